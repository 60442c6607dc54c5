"""Generated bad requests over every door: no 5xx, no hang, and good ones among them get the right bits.

`make reliability` sends a million.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import Server, serving
from tests.reliability.bad_requests import Bad, Wrong, message
from tests.reliability.parsers import parsers
from tests.reliability.wires import IDS

GROWTH = 16 * 2**20
"""Bytes by which the server's own memory may grow in the second half."""


@pytest.fixture(scope="module")
def server(tiny_repository: Path) -> Iterator[Server]:
    with serving(tiny_repository) as running:
        assert httpx.get(f"{running.address}/readyz", timeout=60).status_code == 200
        yield running


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        (0x82, b"\2" + bytes(15), 0),
        (0x82, b'\3{"type":"about:blank","status":503}', 503),
        (0x81, b'{"error": {"status": 422, "detail": "500"}}', 422),
        (0x88, (1011).to_bytes(2, "big") + b"why", 1011),
    ],
)
def test_a_fault_is_seen_in_a_message_of_a_socket(kind: int, content: bytes, expected: int) -> None:
    async def read() -> int:
        reader = asyncio.StreamReader()
        reader.feed_data(bytes([0x89, 0, kind, len(content)]) + content)  # behind a ping
        return await message(reader)

    assert asyncio.run(read()) == expected


@pytest.mark.timeout(14_400)
def test_bad_requests_are_refused_and_good_ones_answered(
    server: Server,
    tables: dict[str, NDArray[np.float32]],
    tmp_path: Path,
    long: bool,
    record_property: Callable[[str, object], None],
) -> None:
    expected = (tables["tokens"][IDS] + tables["positions"][[2, 3, 4]]).tobytes()
    bad = Bad(server, parsers(tmp_path), expected)
    seen = asyncio.run(bad.run(1_000_000 if long else 6000))
    record_property("answers", dict(seen.answers))
    record_property("a second", seen.count / seen.seconds)
    half = len(seen.memory) // 2
    assert max(seen.memory[half:]) - max(seen.memory[:half]) < GROWTH
    assert {answer.split()[0] for answer in seen.answers} == {"http", "socket", "grpc"}


def test_a_wrong_bit_is_seen(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(Bad(server, parsers(tmp_path), bytes(48)).run(100_000))
    assert raised.group_contains(Wrong, match=r"^a good request: \(200, ")
