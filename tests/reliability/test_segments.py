"""The responses to pipelined requests with an error do not depend on the segments of the input.

Oracles: the statuses of each request alone, and the responses to the whole stream in one segment.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.reliability.segments import GOOD, LAST, Piece, answers, draw, generator, statuses, ways_to_cut
from tests.support.servers import Server, serve

BATCH = 10
"""Streams at a time."""


@pytest.fixture(scope="module")
def segment_server(tiny_repository: Path) -> Iterator[Server]:
    with serve(tiny_repository) as running:
        yield running


async def check(address: str, seed: int) -> None:
    """Send one stream in every way, each on a connection of its own."""
    url, random = httpx.URL(address), generator(seed)
    sent, expected = draw(random)
    whole = None
    for segments in ways_to_cut(sent, random):
        found = await answers(url.host, url.port or 80, segments)
        assert statuses(found) == expected, (seed, len(segments), found)
        whole = found if whole is None else whole
        assert found == whole, (seed, len(segments))


async def check_all(address: str, count: int) -> None:
    for begin in range(0, count, BATCH):
        async with asyncio.TaskGroup() as group:
            for seed in range(begin, begin + BATCH):
                group.create_task(check(address, seed))


def test_responses_are_equal_for_any_segmentation(segment_server: Server, long: bool) -> None:
    asyncio.run(check_all(segment_server.address, 6500 if long else 40))


@pytest.mark.parametrize("piece", LAST, ids=range(len(LAST)))
def test_pending_responses_precede_the_error(segment_server: Server, piece: Piece) -> None:
    url, random = httpx.URL(segment_server.address), generator(0)
    sent = GOOD[0].sent + GOOD[7].sent + piece.sent + bytes(2**20)
    segments = next(ways_to_cut(sent, random))
    found = asyncio.run(answers(url.host, url.port or 80, segments))
    assert statuses(found) == [200, 200, *piece.statuses]
