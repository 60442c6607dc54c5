"""Generate the synchronous client from the asynchronous one: `python -m tools.generate_sync`."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "preblock/client"
FILES = ("client", "stream", "retry")
"""Ends of the names of the generated files, `sync_client.py` from `async_client.py`."""
REPLACEMENTS = {
    r"The asynchronous client\. .*\.": "The synchronous client, generated from `async_client.py`.",
    r"`sync_(\w+)\.py` is generated from this file\.": r"Generated from `async_\1.py`.",
    r"; tasks and threads may share it": "; threads may share it",
    r"Awaitable\[(\w+)\]": r"\1",
    r"import Awaitable, ": "import ",
    r"async with": "with",
    r"async def": "def",
    r"await ": "",
    r"__a(enter|exit)__": r"__\1__",
    r"aclose": "close",
    r"asyncio": "threading",
    r"async_(client|stream|retry)(?!\.py)": r"sync_\1",
    r"Async(Transport|Socket)": r"Sync\1",
    r"Async(Client|DecodeStream)": r"\1",
}
RUFF = Path(sys.executable).with_name("ruff")


def generate(name: str) -> str:
    """Return the source of `sync_NAME.py`."""
    text = (FOLDER / f"async_{name}.py").read_text(encoding="utf-8")
    for pattern, replacement in REPLACEMENTS.items():
        text = re.sub(pattern, replacement, text)
    target = f"preblock/client/sync_{name}.py"
    for command in (["check", "--quiet", "--fix", "--select", "I"], ["format", "--quiet"]):
        arguments = [str(RUFF), *command, "--stdin-filename", target, "-"]
        text = subprocess.run(arguments, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


if __name__ == "__main__":
    for name in FILES:
        (FOLDER / f"sync_{name}.py").write_text(generate(name), encoding="utf-8")
