"""Make the pictures of the documents that no export draws, into docs/images: `python -m tools.pictures [NAME …]`."""

import argparse
import base64
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.clients.browser import browsing
from tests.support.paths import ROOT
from tests.support.servers import serve

IMAGES = ROOT / "docs/images"
MAX_BYTES = 150_000


def draw_inspector() -> tuple[str, bytes]:
    """Return the panels of a request and of positions, in Chromium, for `minilm` of `make serve`."""
    with (
        tempfile.TemporaryDirectory() as profile,
        serve(ROOT / "model_repository") as server,
        browsing(f"{server.address}/inspect", Path(profile)) as page,
    ):
        page.call("Emulation.setDeviceMetricsOverride", width=1280, height=1040, deviceScaleFactor=1, mobile=False)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        page.call("Emulation.setScrollbarsHidden", hidden=True)
        page.wait_for("document.getElementById('status').innerText === 'minilm, version 1'")
        for form, answer in (("neighbours", "nearest"), *[("embed", "spans")] * 3):  # later times are the usual ones
            page.evaluate(f"document.getElementById('{form}-form').requestSubmit()")
            page.wait_for(f"document.getElementById('{answer}').checkVisibility()")
        page.wait_for("/^.CLS.*SEP.$/s.test(document.getElementById('spans').innerText)")
        page.wait_for("document.getElementById('similarity-words').innerText")
        page.evaluate("location.hash = '#embed'")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        taken = page.call("Page.captureScreenshot", format="webp", quality=80)
    return "inspector.webp", base64.b64decode(taken["data"])


PICTURES: dict[str, Callable[[], tuple[str, bytes]]] = {"inspector": draw_inspector}
"""How to draw each picture: returns the name of its file, and the content."""


def main() -> None:
    """Write the chosen pictures; fail for one that is too large for a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default all: {', '.join(PICTURES)}")
    for name in parser.parse_args().names or PICTURES:
        if name not in PICTURES:
            parser.error(f"NAME: got {name}, expected {', '.join(PICTURES)}")
        file, content = PICTURES[name]()
        if len(content) > MAX_BYTES:
            parser.error(f"{file}: got {len(content)} bytes, expected at most {MAX_BYTES}")
        (IMAGES / file).write_bytes(content)


if __name__ == "__main__":
    main()
