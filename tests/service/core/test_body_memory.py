"""Reservations of memory for large bodies: their bound, their order, and their end."""

import asyncio

import pytest

from preblock.service.core.body_memory import LARGE_BODY_BYTES, MAX_LARGEST_BODIES, BodyMemory, ResponseMemory
from preblock.service.core.errors import Unavailable
from tests.support.engines import live_settings

BODY = 4 * LARGE_BODY_BYTES


def memory(**options: float) -> BodyMemory:
    return BodyMemory(live_settings(max_body_bytes=BODY, **options))


async def waits(task: asyncio.Task[int]) -> bool:
    """Return whether a reservation waits."""
    await asyncio.sleep(0)
    return not task.done()


def test_bodies_wait_for_memory_in_order() -> None:
    async def scenario() -> None:
        bodies = memory()
        held = [await bodies.reserve(BODY) for _ in range(MAX_LARGEST_BODIES)]
        first, second = (asyncio.create_task(bodies.reserve(size)) for size in (BODY, LARGE_BODY_BYTES))
        assert await waits(first)
        bodies.release(held.pop())
        assert await first == BODY
        assert await waits(second)
        bodies.release(held.pop())
        assert await second == LARGE_BODY_BYTES

    asyncio.run(scenario())


def test_short_bodies_never_wait() -> None:
    async def scenario() -> None:
        bodies = memory()
        for _ in range(MAX_LARGEST_BODIES):
            await bodies.reserve(BODY)
        assert await bodies.reserve(LARGE_BODY_BYTES - 1) == 0

    asyncio.run(scenario())


def test_body_over_limit_reserves_all_memory() -> None:
    async def scenario() -> None:
        bodies = memory()
        held = await bodies.reserve(100 * BODY)
        waiting = asyncio.create_task(bodies.reserve(LARGE_BODY_BYTES))
        assert await waits(waiting)
        bodies.release(held)
        assert await waiting == LARGE_BODY_BYTES

    asyncio.run(scenario())


def test_bodies_beyond_queue_size_are_rejected() -> None:
    async def scenario() -> None:
        bodies = memory(max_queue_size=1)
        held = await bodies.reserve(100 * BODY)
        waiting = asyncio.create_task(bodies.reserve(BODY))
        assert await waits(waiting)
        with pytest.raises(Unavailable, match="busy with other large request bodies, and 1 more wait"):
            await bodies.reserve(BODY)
        bodies.release(held)
        assert await waiting == BODY

    asyncio.run(scenario())


def test_wait_over_queue_timeout_is_rejected() -> None:
    async def scenario() -> None:
        bodies = memory(queue_timeout_seconds=0.05)
        held = await bodies.reserve(100 * BODY)
        with pytest.raises(Unavailable, match=r"^The body waited 0.05 s for other large request bodies. Retry later.$"):
            await bodies.reserve(BODY)
        bodies.release(held)
        assert await bodies.reserve(BODY) == BODY

    asyncio.run(scenario())


@pytest.mark.parametrize("admitted", [False, True])
def test_cancelled_wait_leaves_memory_to_others(admitted: bool) -> None:
    """The client leaves while its body waits, or in the iteration of the event loop in which its wait ends."""

    async def scenario() -> None:
        bodies = memory()
        held = await bodies.reserve(100 * BODY)
        left, other = (asyncio.create_task(bodies.reserve(100 * BODY)) for _ in range(2))
        assert await waits(left)
        if admitted:
            bodies.release(held)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        if not admitted:
            bodies.release(held)
        assert await asyncio.wait_for(other, 10) == MAX_LARGEST_BODIES * BODY

    asyncio.run(scenario())


def test_take_of_held_memory_returns_none() -> None:
    async def scenario() -> None:
        responses = ResponseMemory(live_settings(max_buffered_response_bytes=2**23))
        assert responses.take(LARGE_BODY_BYTES - 1) == 0
        held = responses.take(100 * 2**23)
        assert held == MAX_LARGEST_BODIES * 2**23
        assert responses.take(LARGE_BODY_BYTES) is None
        responses.release(held)
        assert responses.take(LARGE_BODY_BYTES) == LARGE_BODY_BYTES

    asyncio.run(scenario())
