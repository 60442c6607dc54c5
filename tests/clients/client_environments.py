"""Clients with conflicting or large requirements: each runs in an environment of its own, made by `make clients`."""

import json
import subprocess
from typing import Any

import pytest

from tests.support.paths import ROOT


def ask(environment: str, judge: str, *arguments: str) -> Any:
    """Return the result of a judge in an environment of its own; skip the test if the environment is missing."""
    python = ROOT / ".venv" / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment with {environment}; `make clients` makes it")
    script = ROOT / "tests/clients/judges" / judge
    done = subprocess.run([python, script, *arguments], capture_output=True, text=True, env={}, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
