"""Generated bad requests over every protocol: no 5xx, no hang, and good ones among them get the right bits.

`make reliability` sends a million.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.reliability.bad_requests import Bad
from tests.reliability.good_requests import METHODS, PATHS
from tests.reliability.parsers import parsers
from tests.reliability.responses import WrongAnswer
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, serve

GROWTH = 16 * 2**20
"""Limit of the server's memory growth in the second half, in bytes."""


@pytest.fixture(scope="module")
def reject_server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve also a stem, a model with a bias, and a spare one to load and unload."""
    repository = shutil.copytree(tiny_repository, tmp_path_factory.mktemp("every") / "repository")
    shutil.copytree(repository / "gpt", repository / "spare")
    copy_artifact("alibi-7x4x9", repository, "alibi")
    copy_artifact("vit-gray", repository, "vit")
    with serve(repository, "--model-control", "explicit") as running:
        assert httpx.get(f"{running.address}/readyz", timeout=60).status_code == 200
        yield running


@pytest.mark.timeout(14_400)
def test_bad_requests_do_not_affect_good_requests(
    reject_server: Server,
    good_answer: bytes,
    tmp_path: Path,
    long: bool,
    record_property: Callable[[str, object], None],
) -> None:
    bad = Bad(reject_server, parsers(tmp_path), good_answer)
    seen = asyncio.run(bad.run(1_000_000 if long else 6000))
    record_property("answers", dict(seen.answers))
    record_property("a second", seen.count / seen.seconds)
    half = len(seen.memory) // 2
    assert max(seen.memory[half:]) - max(seen.memory[:half]) < GROWTH
    reached = {protocol for protocol, status in map(str.split, seen.answers) if status in ("200", "0", "OK")}
    assert reached == {*PATHS, "lines", "events", "socket", *METHODS, "ModelInfer", "ModelStreamInfer"}


def test_wrong_response_bit_is_detected(reject_server: Server, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(Bad(reject_server, parsers(tmp_path), bytes(48)).run(100_000))
    assert raised.group_contains(WrongAnswer, match=r"^a good request: \(200, ")
