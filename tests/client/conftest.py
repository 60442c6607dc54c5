"""Fixtures to run every test with both clients."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import preblock
from preblock.client.errors import ClientError
from tests.client.flaky_proxy import FlakyProxy
from tests.support.servers import Server

Connect = Callable[..., Any]


def raises_kind(kind: str, match: str | None = None) -> Any:
    """Expect an error of the client by its kind, or by its class if it is no answer of the service."""
    return pytest.raises(
        ClientError, match=match, check=lambda error: kind == getattr(error, "kind", type(error).__name__)
    )


def whole(client: Any, ids: Any, **fields: Any) -> Any:
    """Return the vectors of one call, tested against the native API: the oracle of decode streams."""
    return client.embed(ids, **fields).vectors


class Waiting:
    """An `AsyncClient` with synchronous methods, all run in one event loop."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = preblock.connect_async(url, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._runner.run(method(*args, **kwargs))

    @contextmanager
    def decode(self, model: str, **options: Any) -> Iterator["WaitingStream"]:
        opening = self._client.decode(model, **options)

        async def enter() -> Any:
            return await opening.__aenter__()

        async def leave(*error: Any) -> Any:
            return await opening.__aexit__(*error)

        stream = self._runner.run(enter())
        try:
            yield WaitingStream(self._runner, stream)
        except BaseException:
            self._runner.run(leave(*sys.exc_info()))
            raise
        self._runner.run(leave(None, None, None))

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


class WaitingStream:
    """An `AsyncDecodeStream` with synchronous methods."""

    def __init__(self, runner: asyncio.Runner, stream: Any) -> None:
        self._runner = runner
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self._runner.run(found(*args, **kwargs))


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """`preblock.connect`, and a synchronous `preblock.connect_async`; both close their clients."""
    kind: Any = preblock.connect if request.param == "sync" else Waiting
    with ExitStack() as stack:

        def opened(url: str, **options: Any) -> Any:
            client = kind(url, **options)
            stack.callback(client.close)
            return client

        yield opened


@pytest.fixture
def tiny_client(connect: Connect, tiny_server: Server) -> Any:
    """A client of the tiny models."""
    return connect(tiny_server.address)


@pytest.fixture
def flaky(tiny_server: Server) -> Iterator[FlakyProxy]:
    """A failing proxy before the tiny models."""
    with FlakyProxy(tiny_server.address) as proxy:
        yield proxy
