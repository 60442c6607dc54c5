"""The bound of large bodies that arrive: which of them are read, and which are refused."""

import asyncio

import pytest

from preblock.service.core.body_memory import LARGE_BODY_BYTES, MAX_LARGEST_BODIES
from preblock.service.core.errors import Unavailable
from preblock.service.core.incoming_memory import AwaitedBody, IncomingMemory
from tests.support.engines import live_settings

LARGEST = 4 * LARGE_BODY_BYTES
DROPPED: list[int] = []


def memory(queue_timeout_seconds: float = 30) -> IncomingMemory:
    settings = live_settings(max_body_bytes=LARGEST, queue_timeout_seconds=queue_timeout_seconds)
    return IncomingMemory(settings, DROPPED.append)


def fill(incoming: IncomingMemory) -> list[AwaitedBody]:
    """Take all memory; the first body has most to come."""
    bodies = [AwaitedBody(incoming) for _ in range(MAX_LARGEST_BODIES + 1)]
    assert all(
        body.grow(LARGEST - LARGE_BODY_BYTES if index else LARGE_BODY_BYTES) for index, body in enumerate(bodies)
    )
    assert bodies[1].grow(LARGEST)
    assert bodies[2].grow(LARGEST)
    return bodies


def test_oldest_body_is_read_beyond_the_bound() -> None:
    async def scenario() -> None:
        incoming = memory()
        first, *others = fill(incoming)
        assert first.grow(LARGEST)
        assert not any(body.grow(LARGEST) for body in others[2:])
        assert AwaitedBody(incoming).grow(LARGE_BODY_BYTES - 1)
        waiting = asyncio.create_task(others[2].wait(LARGEST))
        await asyncio.sleep(0)
        first.complete()  # it keeps its memory, and the next body becomes the oldest
        await asyncio.sleep(0)
        assert not waiting.done()
        assert others[0].grow(LARGEST)
        first.end()
        await asyncio.wait_for(waiting, 10)

    asyncio.run(scenario())


def test_slow_body_is_refused_while_others_wait() -> None:
    async def receive_slowly(incoming: IncomingMemory) -> None:
        async with incoming.arrive() as body:
            await body.wait(LARGE_BODY_BYTES)
            await asyncio.sleep(60)

    async def scenario() -> None:
        incoming = memory(0.05)
        slow = asyncio.create_task(receive_slowly(incoming))
        await asyncio.sleep(0.1)
        assert not slow.done()  # nobody waits
        others = [AwaitedBody(incoming) for _ in range(MAX_LARGEST_BODIES)]
        assert not all(body.grow(LARGEST) for body in others)
        with pytest.raises(
            Unavailable, match=r"took more than 0.05 s while others waited for its memory. Retry later.$"
        ):
            await asyncio.wait_for(slow, 10)
        assert others[-1].grow(LARGEST)
        assert DROPPED == [LARGE_BODY_BYTES]

    asyncio.run(scenario())
