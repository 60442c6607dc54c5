"""Turns of connections with large messages, with calls of chosen sizes and times in place of gRPC's own."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from preblock.service.api.grpc.message_reader import MAX_CONNECTIONS, MAX_TURN_SECONDS, MessageReader
from preblock.service.core.body_memory import LARGE_BODY_BYTES
from tests.support.open_inference import NO_LIMIT, OWN_CONNECTION, infer_message, open_stub
from tests.support.servers import Server

LARGE, SMALL = bytes(LARGE_BODY_BYTES), b"1"


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run an asynchronous test."""

    @wraps(test)
    def run() -> None:
        async def main() -> None:
            await test()

        asyncio.run(main())

    return run


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


async def begin(reader: MessageReader, call: Call) -> asyncio.Task[bytes | None]:
    """Begin to read a message, and give the reader time for it."""
    task = asyncio.create_task(reader.read(call))
    await asyncio.sleep(0.01)
    return task


async def known(*connections: str) -> MessageReader:
    """Return a reader that has read a large message from each connection."""
    reader = MessageReader()
    for connection in connections:
        assert await reader.read(arrived(connection, LARGE)) is LARGE
    return reader


@in_loop
async def test_end_of_call_is_none() -> None:
    assert await MessageReader().read(arrived("a", grpc.aio.EOF)) is None


@in_loop
async def test_first_messages_take_no_turns() -> None:
    reader = MessageReader()
    first, second = Call("a", LARGE), Call("b", LARGE)
    tasks = [await begin(reader, first), await begin(reader, second)]
    assert first.reading
    assert second.reading
    first.arrived.set()
    second.arrived.set()
    assert await asyncio.gather(*tasks) == [LARGE, LARGE]


@in_loop
async def test_large_senders_read_one_message_at_a_time() -> None:
    reader = await known("a", "b")
    first, second, small = Call("a", LARGE), arrived("b", SMALL), arrived("c", SMALL)
    reading, waiting = await begin(reader, first), await begin(reader, second)
    assert first.reading
    assert not second.reading
    assert await reader.read(small) is SMALL  # of another connection
    first.arrived.set()
    assert (await reading, await waiting) == (LARGE, SMALL)


@in_loop
async def test_small_message_ends_turns_of_its_connection() -> None:
    reader = await known("a", "b")
    assert await reader.read(arrived("b", SMALL)) is SMALL
    held = await begin(reader, Call("a", LARGE))
    assert await reader.read(arrived("b", SMALL)) is SMALL
    assert not held.done()
    held.cancel()


@in_loop
async def test_turn_is_followed_by_pause_of_its_work() -> None:
    reader = await known("a", "b")
    call = Call("a", LARGE)
    reading = await begin(reader, call)
    end = time.process_time() + MAX_TURN_SECONDS / 4
    while time.process_time() < end:
        pass
    call.arrived.set()
    await reading
    ended, next_ = time.perf_counter(), arrived("b", SMALL)
    await reader.read(next_)
    assert time.perf_counter() - ended >= MAX_TURN_SECONDS / 4


@in_loop
async def test_turn_of_silent_client_ends() -> None:
    reader = await known("a", "b")
    silent, call = Call("a", LARGE), arrived("b", SMALL)
    held = await begin(reader, silent)
    began = time.perf_counter()
    assert await reader.read(call) is SMALL
    assert time.perf_counter() - began >= MAX_TURN_SECONDS / 2
    silent.arrived.set()
    assert await held is LARGE
    # The late message has released nothing twice: two turns still exclude each other.
    first, second = Call("a", LARGE), Call("a", LARGE)
    tasks = [await begin(reader, first), await begin(reader, second)]
    assert first.reading
    assert not second.reading
    for task in tasks:
        task.cancel()


@in_loop
async def test_cancelled_call_leaves_its_turn() -> None:
    reader = await known("a", "b", "c")
    held, waiting = await begin(reader, Call("a", LARGE)), await begin(reader, Call("b", LARGE))
    waiting.cancel()
    held.cancel()
    async with asyncio.timeout(MAX_TURN_SECONDS / 2):
        assert await reader.read(arrived("c", SMALL)) is SMALL


@in_loop
async def test_oldest_large_senders_are_forgotten() -> None:
    reader = await known("a", "b")
    held = await begin(reader, Call("b", LARGE))
    for number in range(MAX_CONNECTIONS - 1):
        await reader.read(arrived(f"other {number}", LARGE))
    assert await reader.read(arrived("a", SMALL)) is SMALL
    assert not held.done()
    held.cancel()


def test_call_without_a_message_is_refused(tiny_server: Server) -> None:
    with grpc.insecure_channel(tiny_server.grpc) as channel:
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as refused:
            call(iter([]))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "message: got no message, expected one message"


def test_large_messages_of_one_connection_are_answered(tiny_server: Server) -> None:
    ids = np.zeros((2**13, 6), np.int64)
    with open_stub(tiny_server.grpc, OWN_CONNECTION, NO_LIMIT) as stub:
        answers = [stub.ModelInfer(infer_message(ids)).raw_output_contents[0] for _ in range(3)]
        (streamed,) = stub.ModelStreamInfer(iter([infer_message(ids)]))
        assert stub.ServerLive(service_pb2.ServerLiveRequest()).live
    row = stub_row(tiny_server)
    assert answers == [row * len(ids)] * 3
    assert streamed.infer_response.raw_output_contents[0] == answers[0]


def stub_row(server: Server) -> bytes:
    """Return the vectors of one row, from a small message."""
    with open_stub(server.grpc) as stub:
        row: bytes = stub.ModelInfer(infer_message(np.zeros((1, 6), np.int64))).raw_output_contents[0]
        return row
