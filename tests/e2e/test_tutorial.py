"""The tutorial, block by block in one folder, against the server that it starts."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.servers import read_banner

TEXT = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serve(folder: Path, command: str) -> Iterator[str]:
    """Run the command for a server on a free port, and yield its address."""
    with subprocess.Popen(
        f"exec {command.strip()} --port 0",
        shell=True,
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield read_banner(process)[1]
        finally:
            process.terminate()


def test_tutorial_blocks_print_documented_output(tmp_path: Path) -> None:
    languages = [language for language, _ in BLOCKS]
    assert languages == ["sh", *["python"] * 2, "sh", "sh", "python", "", "python", "", "python", ""]
    install, module, export, inspect, start, embed, embedded, decode, decoded, mistake, refused = (
        code for _, code in BLOCKS
    )
    assert install.startswith("pip install")  # a test of the distributions installs them
    (tmp_path / "my_module.py").write_text(module)
    assert run(tmp_path, sys.executable, "-c", export).strip().endswith("mine/1")
    shown = run(tmp_path, "bash", "-c", inspect)
    assert "999" in shown
    assert "128" in shown
    with serve(tmp_path, start) as address:

        def python(code: str) -> str:
            return run(tmp_path, sys.executable, "-W", "error", "-c", code.replace("http://127.0.0.1:8000", address))

        assert python(embed) == embedded
        assert python(decode) == decoded
        assert python(mistake) == refused
