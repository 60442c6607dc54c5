"""A recording of a terminal as an SVG file: commands are typed, their output appears, and the last frame stays."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLUMNS = 110
LINE_PIXELS, COLUMN_PIXELS, MARGIN_PIXELS = 19, 7.55, 16
TYPING_SECONDS, READING_SECONDS = 1.2, 2.0  # STYLE repeats the first

STYLE = """
svg { --paper: #ffffff; --edge: #d0d7de; --text: #1f2328; --output: #57606a; --prompt: #1a7f37 }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --edge: #30363d; --text: #e6edf3; --output: #9da7b1; --prompt: #3fb950 }
}
rect { fill: var(--paper); stroke: var(--edge) }
text { font: 12.5px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
.command { fill: var(--text); font-weight: bold } .output { fill: var(--output) } .prompt { fill: var(--prompt) }
@keyframes type { from { clip-path: inset(0 100% 0 0) } to { clip-path: inset(0) } }
@keyframes show { from { opacity: 0 } to { opacity: 1 } }
.command { animation: type 1.2s steps(40) backwards } .output { animation: show 0.1s backwards }
@media (prefers-reduced-motion: reduce) { .command, .output { animation: none } }
"""


@dataclass(frozen=True)
class Entry:
    """A command, its output, and the number of lines of this output to show."""

    command: str
    output: str
    lines: int = 6

    def wrap_output(self) -> Iterator[str]:
        """Yield lines of at most `COLUMNS` characters; an ellipsis ends the last one if more follow."""
        pieces = [
            line[start : start + COLUMNS]
            for line in self.output.splitlines()
            for start in range(0, max(len(line), 1), COLUMNS)
        ]
        yield from pieces[: self.lines - 1]
        if len(pieces) > self.lines:
            yield f"{pieces[self.lines - 1][: COLUMNS - 1]}…"
        else:
            yield from pieces[self.lines - 1 :]


def write_recording(title: str, entries: Iterable[Entry]) -> str:
    """Return an SVG document that plays `entries` once. It follows the light or dark theme, and needs no script."""
    texts: list[str] = []
    seconds, row = 0.5, 0

    def write(kind: str, content: str) -> None:
        y = MARGIN_PIXELS + LINE_PIXELS * (row + 0.75)
        place = f'style="animation-delay: {seconds:.1f}s" x="{MARGIN_PIXELS}" y="{y:g}"'
        texts.append(f'<text class="{kind}" {place}>{content}</text>')

    for entry in entries:
        write("command", f'<tspan class="prompt">$ </tspan>{escape(entry.command)}')
        seconds += TYPING_SECONDS
        for line in entry.wrap_output():
            row += 1
            write("output", escape(line))
        seconds += READING_SECONDS
        row += 2
    width, height = 2 * MARGIN_PIXELS + COLUMNS * COLUMN_PIXELS, 2 * MARGIN_PIXELS + (row - 1) * LINE_PIXELS
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
            *texts,
            "</svg>\n",
        ]
    )
