"""Large bodies wait for the memory of others on every code path, and get status 503 after the queue timeout."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from preblock.service.app import create_app, create_engine
from preblock.service.core.large_bodies import LARGE_BODY_BYTES, MAX_LARGEST_BODIES
from preblock.service.core.settings import Settings
from preblock.service.engine.engine import Engine
from preblock.service.server.run import configure
from tests.service.matrix.code_paths import DIRECT, PREBLOCK, CodePath
from tests.support.servers import Server, live_server

IDS = np.ones((LARGE_BODY_BYTES // 32, 4), np.int64)
"""As bytes, the largest body that the connection reads itself, and the smallest that reserves memory."""
MAX_BODY_BYTES = 2 * LARGE_BODY_BYTES
ROWS = [path for path in DIRECT if path.name in ("native-first", "native-asgi")]
"""Requests that the connection answers without a task, and requests of the application."""


@contextmanager
def full_memory(engine: Engine) -> Iterator[None]:
    """Reserve all memory for bodies during the block."""
    held = asyncio.run(engine.limits.bodies.reserve(MAX_LARGEST_BODIES * MAX_BODY_BYTES))
    try:
        yield
    finally:

        async def release() -> None:
            engine.limits.bodies.release(held)

        asyncio.run(release())


@pytest.fixture(scope="module")
def served(tiny_repository: Path) -> Iterator[tuple[Server, Engine]]:
    settings = Settings(repository=tiny_repository, max_body_bytes=MAX_BODY_BYTES, queue_timeout_seconds=0.1)
    engine = create_engine(settings)
    with live_server(configure(settings, create_app(settings, engine))) as port:
        yield Server(f"http://127.0.0.1:{port}", "", 0, ""), engine


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.name)
def test_large_body_waits_for_memory(path: CodePath, served: tuple[Server, Engine]) -> None:
    server, engine = served
    with path.open({PREBLOCK: server}) as caller:
        for _ in range(2):  # the wait of the first attempt must not keep memory
            assert caller.ask(IDS).status == 200
            with full_memory(engine):
                refused = caller.ask(IDS)
            assert (refused.status, "waited 0.1 s for other large" in refused.message) == (503, True), refused
        assert caller.ask(IDS).status == 200
