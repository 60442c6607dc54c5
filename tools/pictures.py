"""Make the pictures of the documents that no export draws, into docs/images: `python -m tools.pictures [NAME …]`."""

import argparse
import base64
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.clients.browser import browsing
from tests.support.paths import PREBLOCK, ROOT
from tests.support.servers import serve
from tools.terminal import Entry, write_recording

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


def record_first_minute() -> tuple[str, bytes]:
    """Return a recording of the commands of the first minute: serve, get vectors, meet an error, verify a model."""
    address, repository = "http://127.0.0.1:8000", "model_repository"
    embed = f"curl {address}/models/minilm/embed -d"
    text, late = '{"text": "Hello, world!", "encoding": "float"}', '{"text": "Hello, world!", "offset": 510}'
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder, repository)
        root.mkdir()
        for name in ("gpt2-small", "transformer-base", "wordllama"):
            (root / name).symlink_to(ROOT / repository / name)
        shutil.copytree(ROOT / repository / "minilm", root / "minilm")  # `verify` writes its report
        server = stack.enter_context(serve(root))

        def run(command: str) -> str:
            local = command.replace(address, server.address).replace("preblock ", f"{PREBLOCK} ", 1)
            local = local.replace("curl ", "curl -sS ")
            done = subprocess.run(local, shell=True, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
            return done.stdout

        started = server.banner.partition("gRPC on")[0].replace(server.address, address)
        commands = [(f"{embed} '{text}'", 3), (f"{embed} '{late}'", 2), ("preblock verify minilm", 2)]
        entries = [Entry("make serve", started), *(Entry(command, run(command), lines) for command, lines in commands)]
    return "first-minute.svg", write_recording("The first minute with Preblock in a terminal", entries).encode()


PICTURES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "inspector": draw_inspector,
    "first-minute": record_first_minute,
}
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
