"""Tests large bodies: bounds of their memory, and turns of their writing."""

import asyncio

import pytest

from preblock.service.core.errors import Unavailable
from preblock.service.core.large_bodies import (
    LARGE_BODY_BYTES,
    MAX_LARGEST_BODIES,
    AwaitedBody,
    BodyMemory,
    IncomingMemory,
    ResponseMemory,
    WriteTurns,
)
from tests.support.engines import live_settings
from tests.support.loops import in_loop

BODY = 4 * LARGE_BODY_BYTES


def memory(**options: float) -> BodyMemory:
    return BodyMemory(live_settings(max_body_bytes=BODY, **options))


async def waits(task: asyncio.Task[int]) -> bool:
    """Return whether a reservation waits."""
    await asyncio.sleep(0)
    return not task.done()


@in_loop
async def test_bodies_wait_for_memory_in_order() -> None:
    bodies = memory()
    held = [await bodies.reserve(BODY) for _ in range(MAX_LARGEST_BODIES)]
    assert await bodies.reserve(LARGE_BODY_BYTES - 1) == 0  # a short one never waits
    first, second = (asyncio.create_task(bodies.reserve(size)) for size in (BODY, LARGE_BODY_BYTES))
    assert await waits(first)
    bodies.release(held.pop())
    assert await first == BODY
    assert await waits(second)
    bodies.release(held.pop())
    assert await second == LARGE_BODY_BYTES


@in_loop
async def test_bodies_beyond_queue_size_are_rejected() -> None:
    bodies = memory(max_queue_size=1)
    held = await bodies.reserve(100 * BODY)
    waiting = asyncio.create_task(bodies.reserve(BODY))
    assert await waits(waiting)
    with pytest.raises(Unavailable, match="busy with other large request bodies, and 1 more wait"):
        await bodies.reserve(BODY)
    bodies.release(held)
    assert await waiting == BODY


@in_loop
async def test_wait_over_queue_timeout_is_rejected() -> None:
    bodies = memory(queue_timeout_seconds=0.05)
    held = await bodies.reserve(100 * BODY)
    with pytest.raises(Unavailable, match=r"^The body waited 0.05 s for other large request bodies. Retry later.$"):
        await bodies.reserve(BODY)
    bodies.release(held)
    assert await bodies.reserve(BODY) == BODY


@in_loop
async def test_wait_ends_under_a_lower_limit() -> None:
    settings, largest = live_settings(max_buffered_response_bytes=2**26), MAX_LARGEST_BODIES * 2**26
    responses = ResponseMemory(settings)
    held = await responses.reserve(largest)
    waiting = asyncio.create_task(responses.reserve(largest))
    assert await waits(waiting)
    settings.use(settings.current.model_copy(update={"max_buffered_response_bytes": 2**23}))
    responses.release(held)
    assert await asyncio.wait_for(waiting, 1) == largest


@pytest.mark.parametrize("admitted", [False, True])
@in_loop
async def test_cancelled_wait_leaves_memory_to_others(admitted: bool) -> None:
    """The client leaves while its body waits, or in the iteration of the event loop in which its wait ends."""

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


LARGEST = 4 * LARGE_BODY_BYTES
DROPPED: list[int] = []


def incoming_memory(queue_timeout_seconds: float = 30) -> IncomingMemory:
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


@in_loop
async def test_oldest_body_is_read_beyond_the_bound() -> None:
    incoming = incoming_memory()
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
    later = asyncio.create_task(others[2].wait(2 * LARGEST))
    await asyncio.sleep(0)
    assert not later.done()  # it waits each time
    later.cancel()


@in_loop
async def test_slow_body_is_refused_while_others_wait() -> None:
    async def receive_slowly(incoming: IncomingMemory) -> None:
        async with incoming.arrive() as body:
            await body.wait(LARGE_BODY_BYTES)
            await asyncio.sleep(60)

    incoming = incoming_memory(0.05)
    slow = asyncio.create_task(receive_slowly(incoming))
    await asyncio.sleep(0.1)
    assert not slow.done()  # nobody waits
    others = [AwaitedBody(incoming) for _ in range(MAX_LARGEST_BODIES)]
    assert not all(body.grow(LARGEST) for body in others)
    with pytest.raises(Unavailable, match=r"took more than 0.05 s while others waited for its memory. Retry later.$"):
        await asyncio.wait_for(slow, 10)
    assert others[-1].grow(LARGEST)
    assert DROPPED == [LARGE_BODY_BYTES]


@pytest.mark.parametrize("responses", [1, 2, 5])
@in_loop
async def test_one_chunk_is_written_per_iteration(responses: int) -> None:
    turns, iteration, written = WriteTurns(), 0, []

    async def respond(number: int) -> None:
        await turns.wait(next_chunk=False)
        for _ in range(4):
            written.append((iteration, number))
            await turns.wait()

    tasks = [asyncio.create_task(respond(number)) for number in range(responses)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        iteration += 1
    iterations = [when for when, _ in written]
    assert len(set(iterations)) == len(iterations) == 4 * responses
    assert sorted(number for _, number in written) == sorted([*range(responses)] * 4)


@in_loop
async def test_turn_of_cancelled_response_goes_to_next() -> None:
    turns = WriteTurns()
    await turns.wait(next_chunk=False)
    left, other = (asyncio.create_task(turns.wait()) for _ in range(2))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait_for(other, 5)
