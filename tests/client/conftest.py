"""Fixtures to run a test with both clients. One is generated from the other, so tests of calls alone use one."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

import preblock
from preblock.client.async_stream import AsyncDecodeStream
from preblock.client.errors import ClientError
from tests.client.flaky_proxy import FlakyProxy
from tests.support.artifacts import make_repository
from tests.support.servers import Server
from tests.support.shared import Shared

Connect = Callable[..., Any]
KINDS = {name: name for name in ("bert", "gemma", "gpt", "llama", "ngrams", "nine-levels", "vit")}
KINDS |= {"alibi": "alibi-levels"}
"""Stored artifacts by the names of their models: what the tiny models lack."""


def raises_kind(kind: str, match: str | None = None) -> Any:
    """Expect an error of the client by its kind, or by its class if it is no answer of the service."""
    return pytest.raises(
        ClientError, match=match, check=lambda error: kind == getattr(error, "kind", type(error).__name__)
    )


def whole(client: Any, ids: Any, **fields: Any) -> Any:
    """Return the vectors of one call, tested against the native API: the oracle of decode streams."""
    return client.embed(ids, **fields).vectors


class Waiting:
    """An asynchronous client, or a stream of it, with synchronous methods, all run in one event loop."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target, self._runner = target, runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        return self._call(found) if callable(found) else found

    def __enter__(self) -> Self:
        self._call(self._target.__aenter__)()
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._target.__aexit__)(*error)

    def close(self) -> None:
        self._call(self._target.aclose)()

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            if isinstance(found, AsyncDecodeStream):
                return Waiting(found, self._runner)
            return self._runner.run(found) if inspect.iscoroutine(found) else found

        return call


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """`preblock.connect`, and a synchronous `preblock.connect_async`; both close their clients."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())

        def opened(url: Any, **options: Any) -> Any:
            if request.param == "sync":
                client: Any = preblock.connect(url, **options)
            else:
                client = Waiting(preblock.connect_async(url, **options), runner)
            stack.callback(client.close)
            return client

        yield opened


def call(client: Any) -> Any:
    return client.embed([1, 2], model="gpt").vectors


def stream(client: Any) -> Any:
    with client.decode("gpt", resume=True) as opened:
        return opened.step([1, 2])


@pytest.fixture(params=[call, stream])
def exchange(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """A function of a client: two vectors by a call, and by a new decode stream that resumes."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def tiny_client(tiny_server: Server) -> Iterator[preblock.client.Client]:
    """A client of the tiny models."""
    with preblock.connect(tiny_server.address) as client:
        yield client


@pytest.fixture(scope="session")
def kinds_repository(shared: Shared) -> Path:
    return shared.make("client kinds", lambda root: make_repository(root, **KINDS))


@pytest.fixture(scope="session")
def kinds_server(kinds_repository: Path, shared: Shared) -> Server:
    """Serve one model of each of KINDS, for all workers."""
    return shared.server("client kinds", kinds_repository)


@pytest.fixture(scope="session")
def kinds_client(kinds_server: Server) -> Iterator[preblock.client.Client]:
    with preblock.connect(kinds_server.address) as client:
        yield client


@pytest.fixture
def flaky(tiny_server: Server) -> Iterator[FlakyProxy]:
    """A failing proxy before the tiny models."""
    with FlakyProxy(tiny_server.address) as proxy:
        yield proxy
