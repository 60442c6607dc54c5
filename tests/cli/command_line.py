"""Runs of the command line."""

import subprocess
from pathlib import Path

from tests.support import commands
from tests.support.paths import PREBLOCK


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `preblock` in a process forked after its heavy imports."""
    return commands.run(commands.preblock, *arguments, environment=environment)


def run_installed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `preblock` as a shell does."""
    return subprocess.run([PREBLOCK, *map(str, arguments)], capture_output=True, text=True, check=False)


def printed(*arguments: str | Path, **environment: str) -> str:
    """Run a command, check that it succeeds without a word on standard error, and return what it prints."""
    done = run(*arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def failing(*arguments: str | Path, code: int, **environment: str) -> str:
    """Run a command, check that it fails with `code`, and return its one line."""
    done = run(*arguments, **environment)
    assert (done.returncode, done.stdout) == (code, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("preblock: ")
    return line.removeprefix("preblock: ")
