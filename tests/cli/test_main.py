"""The first steps of the program, before the command line is imported."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, gc, sys
atexit.register(lambda: print(gc.isenabled()))
from preblock.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "collects"),
    [(("serve", "--port", "x"), False), (("--debug", "serve", "--port", "x"), False), (("inspect", "serve"), True)],
)
def test_only_start_of_server_collects_no_garbage(arguments: tuple[str, ...], collects: bool) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"{collects}\n", 1 if collects else 2), done.stderr
