"""Random bytes for every parser of bytes: a result or a PreblockError, and nothing else.

`make reliability` draws a thousand times as many, and lets atheris look for new lines of code.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

import tests.support.profiles  # noqa: F401
from preblock.service.core.errors import PreblockError
from tests.reliability.drawn import hold
from tests.reliability.parsers import Parser, parsers
from tests.support.paths import ROOT

NAMES = ("v2", "stem", "message", "json", "frames", "npy", "raw", "safetensors", "protobuf", "manifest", "graphs")
ALONE = ("protobuf",)
"""Parsers in conflict with the clients of other tests in the same process."""


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parser]:
    return parsers(tmp_path_factory.mktemp("parsers"))


@pytest.mark.parametrize("name", NAMES)
def test_parser_of_random_bytes_raises_only_preblock_errors(
    every: dict[str, Parser], name: str, tmp_path: Path
) -> None:
    if name in ALONE:
        count = settings().max_examples
        command = [sys.executable, "-m", "tests.reliability.drawn", name, str(tmp_path), str(count)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return
    hold(every[name])


def test_parser_accepts_its_seeds(every: dict[str, Parser]) -> None:
    assert tuple(every) == NAMES
    for name in set(NAMES) - {*ALONE}:
        for seed in every[name].seeds:
            every[name].read(seed)  # raises nothing


def test_key_of_external_data_outside_utf8_is_rejected(every: dict[str, Parser]) -> None:
    """A past failure."""
    parser = every["graphs"]
    with pytest.raises(PreblockError):
        parser.read(parser.seeds[0].replace(b"location", b"l\xdecation"))
