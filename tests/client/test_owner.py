"""Clients shared over a fork, or used in a second event loop: each owner has its own connections."""

import asyncio
import gc
import multiprocessing
import threading
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest

import preblock
from preblock.client import errors
from tests.client.conftest import call, raises_kind
from tests.client.flaky_proxy import FlakyProxy

T = TypeVar("T")

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # threads of tests are idle


def in_child(call: Callable[[], T]) -> T:
    """Return the result of `call` in a fork of this process, or raise its error here."""
    context = multiprocessing.get_context("fork")
    results: multiprocessing.SimpleQueue[Any] = context.SimpleQueue()

    def run() -> None:
        try:
            results.put(call())
        except Exception as error:
            results.put(error)

    child = context.Process(target=run)
    child.start()
    result = results.get()
    child.join(30)
    if isinstance(result, Exception):
        raise result
    answer: T = result
    return answer


def in_new_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in an event loop of its own. It leaves connections open, and Python warns of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        result = asyncio.run(work)
        gc.collect()
    return result


def test_call_after_fork_uses_its_own_connection(flaky: FlakyProxy) -> None:
    with preblock.connect(flaky.address) as client:

        def close() -> None:
            call(client)
            client.close()

        expected = call(client)
        assert np.array_equal(in_child(lambda: call(client)), expected)
        in_child(close)
        assert np.array_equal(call(client), expected)
    assert flaky.connections == 3


def test_call_after_fork_rejects_own_httpx_client(flaky: FlakyProxy) -> None:
    with httpx.Client() as http_client:
        client = preblock.connect(flaky.address, http_client=http_client)
        expected = call(client)
        with raises_kind("Invalid", match="^http_client: got the httpx client of another process, expected a new "):
            in_child(lambda: call(client))
        assert np.array_equal(call(client), expected)


@pytest.mark.parametrize("resume", [False, True])
def test_stream_after_fork_is_closed_or_resumes(flaky: FlakyProxy, resume: bool) -> None:
    with preblock.connect(flaky.address) as client, client.decode("gpt", resume=resume) as stream:
        expected = client.embed([1, 2, 3], model="gpt").vectors
        stream.step([1])
        if resume:
            assert np.array_equal(in_child(lambda: [stream.step([2]), stream.step([3])][1]), expected[:, 2:])
        else:
            with pytest.raises(errors.StreamClosed, match="belongs to another process ") as raised:
                in_child(lambda: stream.step([2]))
            assert raised.value.offset == [1]
            in_child(stream.close)
        assert np.array_equal(stream.step([2]), expected[:, 1:2])


def test_stream_after_fork_needs_no_lock_of_a_thread(flaky: FlakyProxy) -> None:
    with preblock.connect(flaky.address) as client, client.decode("gpt", resume=True) as stream:
        busy, ended = threading.Event(), threading.Event()

        def ping() -> None:
            while not ended.is_set():
                stream.ping()
                busy.set()

        with ThreadPoolExecutor() as pool:
            pinging = pool.submit(ping)
            busy.wait(60)
            try:
                for _ in range(5):  # a fork between two pings proves nothing
                    assert in_child(lambda: stream.step([1])).shape == (1, 1, 4)
            finally:
                ended.set()
            pinging.result()


def test_async_client_works_in_a_second_event_loop(flaky: FlakyProxy) -> None:
    client = preblock.connect_async(flaky.address, retries=0)

    async def embed() -> Any:
        return (await client.embed([1, 2], model="gpt")).vectors

    async def embed_and_close() -> Any:
        async with client:
            return await embed()

    expected = in_new_loop(embed())
    assert np.array_equal(in_new_loop(embed()), expected)
    assert np.array_equal(in_new_loop(embed_and_close()), expected)
    assert flaky.connections == 3


@pytest.mark.parametrize("resume", [False, True])
def test_async_stream_in_a_second_event_loop(flaky: FlakyProxy, resume: bool) -> None:
    stream = preblock.connect_async(flaky.address).decode("gpt", resume=resume)

    async def ping_twice_and_step() -> Any:
        await asyncio.gather(stream.ping(), stream.ping())  # tasks share the lock of their loop
        return await stream.step([1])

    async def continue_and_close() -> Any:
        async with stream:
            return await ping_twice_and_step()

    in_new_loop(ping_twice_and_step())
    if resume:
        assert in_new_loop(continue_and_close()).shape == (1, 1, 4)
        assert stream.offset == [2]
    else:
        with pytest.raises(errors.StreamClosed, match="another process or event loop") as raised:
            in_new_loop(continue_and_close())
        assert raised.value.offset == [1]


def test_call_of_a_closed_client_is_rejected(flaky: FlakyProxy) -> None:
    client, other = preblock.connect(flaky.address), preblock.connect_async(flaky.address)
    client.models()
    client.close()
    asyncio.run(other.aclose())
    http_client = httpx.Client()
    http_client.close()
    lent = preblock.connect(flaky.address, http_client=http_client)
    for ask in (client.models, client.ready, lent.models, lambda: asyncio.run(other.models())):
        with raises_kind("Invalid") as raised:
            ask()
        assert (raised.value.field, raised.value.got) == ("client", "a closed client")
