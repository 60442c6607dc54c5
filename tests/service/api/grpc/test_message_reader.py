"""Turns of connections with large messages, with calls of chosen sizes and times in place of gRPC's own."""

import asyncio
import time
from typing import Any

import pytest

from preblock.service.api.grpc.message_reader import MAX_CONNECTIONS, MessageReader
from preblock.service.core.errors import Unavailable
from preblock.service.core.large_bodies import LARGE_BODY_BYTES
from preblock.service.core.settings import LiveSettings, Settings
from tests.support.loops import in_loop

LARGE, SMALL = bytes(LARGE_BODY_BYTES), b"1"
LONG = 60.0
"""Seconds; every test is over before."""


class Call:
    """A call of a connection; its message arrives when `arrived` is set."""

    def __init__(self, connection: str, message: Any) -> None:
        self.connection, self.message = connection, message
        self.reading, self.arrived = False, asyncio.Event()

    def peer(self) -> str:
        return self.connection

    async def read(self) -> Any:
        self.reading = True
        await self.arrived.wait()
        return self.message


def arrived(connection: str, message: Any) -> Call:
    call = Call(connection, message)
    call.arrived.set()
    return call


def reader_of(turn_seconds: float = LONG, **settings: Any) -> MessageReader:
    return MessageReader(LiveSettings(Settings(**settings)), turn_seconds)


async def known(reader: MessageReader, *connections: str) -> None:
    """Read a large message from each connection."""
    for connection in connections:
        assert await reader.read(arrived(connection, LARGE)) is LARGE


async def begin(reader: MessageReader, *calls: Call) -> list[asyncio.Task[bytes | None]]:
    """Begin to read the messages of calls."""
    tasks = [asyncio.create_task(reader.read(call)) for call in calls]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def reads(*calls: Call) -> None:
    """Wait until the messages of all calls are being read; a pause may delay them."""
    async with asyncio.timeout(LONG):
        while not all(call.reading for call in calls):
            await asyncio.sleep(0.001)


@in_loop
async def test_small_message_ends_turns_of_its_connection() -> None:
    reader = reader_of()
    await known(reader, "a", "b")
    assert await reader.read(arrived("b", SMALL)) is SMALL
    first, second, *others = Call("a", SMALL), arrived("b", SMALL), Call("a", LARGE), Call("a", LARGE)
    await begin(reader, first, second, *others)
    await reads(first, second)
    assert [call.reading for call in others] == [False, False]
    first.arrived.set()
    await reads(*others)


@in_loop
async def test_connections_take_turns_with_one_call_each() -> None:
    reader = reader_of()
    await known(reader, "a", "b")
    first, *more, other = Call("a", LARGE), Call("a", LARGE), Call("a", LARGE), Call("b", LARGE)
    await begin(reader, first, *more, other)
    assert [first.reading, other.reading] == [True, False]
    first.arrived.set()
    await reads(other)
    assert [call.reading for call in more] == [False, False]


@in_loop
async def test_turn_is_followed_by_pause_of_its_work() -> None:
    reader = reader_of()
    await known(reader, "a", "b")
    call, next_ = Call("a", LARGE), arrived("b", SMALL)
    tasks = await begin(reader, call, next_)
    end = time.process_time() + 0.03
    while time.process_time() < end:
        pass
    ended = time.perf_counter()
    call.arrived.set()
    await asyncio.gather(*tasks)
    assert time.perf_counter() - ended >= 0.03


@in_loop
async def test_cancelled_call_leaves_its_turn() -> None:
    reader = reader_of()
    await known(reader, "a", "b", "c")
    for task in await begin(reader, Call("a", LARGE), Call("a", LARGE), Call("b", LARGE)):
        task.cancel()
    async with asyncio.timeout(LONG):
        for connection in ("a", "b", "c"):
            assert await reader.read(arrived(connection, LARGE)) is LARGE


@in_loop
async def test_call_over_queue_timeout_is_unavailable() -> None:
    reader = reader_of(queue_timeout_seconds=0.05)
    await known(reader, "a", "b")
    first = Call("a", LARGE)
    (held,) = await begin(reader, first)
    with pytest.raises(Unavailable, match=r"^The message waited 0\.05 s for other large messages\. Retry later\.$"):
        await reader.read(Call("b", LARGE))
    first.arrived.set()
    assert await held is LARGE
    assert await reader.read(arrived("b", LARGE)) is LARGE


@in_loop
async def test_oldest_large_senders_are_forgotten() -> None:
    reader = reader_of()
    for number in range(MAX_CONNECTIONS + 1):
        await reader.read(arrived(str(number), LARGE))
    held, oldest, next_ = Call("2", LARGE), Call("0", LARGE), Call("1", LARGE)
    await begin(reader, held, oldest, next_)
    assert [held.reading, oldest.reading, next_.reading] == [True, True, False]


@in_loop
async def test_stream_waits_for_a_turn_after_a_large_message() -> None:
    reader = reader_of()
    await known(reader, "a")
    first, stream = Call("a", LARGE), arrived("b", SMALL)
    (held,) = await begin(reader, first)
    reading = asyncio.create_task(reader.read_next(stream, LARGE_BODY_BYTES))
    await asyncio.sleep(0.001)
    assert await reader.read_next(arrived("b", SMALL), LARGE_BODY_BYTES - 1) is SMALL
    assert not stream.reading
    first.arrived.set()
    assert await held is LARGE
    assert await reading is SMALL


@in_loop
async def test_idle_stream_leaves_its_turn() -> None:
    reader, idle = reader_of(), Call("a", LARGE)
    waiting = asyncio.create_task(reader.read_next(idle, LARGE_BODY_BYTES))
    await reads(idle)
    assert await reader.read_next(arrived("b", LARGE), LARGE_BODY_BYTES) is LARGE
    assert not waiting.done()
    idle.arrived.set()
    assert await waiting is LARGE


@in_loop
async def test_turn_of_silent_client_ends_once() -> None:
    reader = reader_of(turn_seconds=0.01)
    await known(reader, "a", "b")
    silent, other = Call("a", LARGE), arrived("b", LARGE)
    (held,) = await begin(reader, silent)
    assert await reader.read(other) is LARGE
    silent.arrived.set()
    assert await held is LARGE
    assert await asyncio.gather(*(reader.read(arrived(name, LARGE)) for name in "ab")) == [LARGE, LARGE]
