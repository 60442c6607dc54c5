"""A server of its own for hostile connections."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers import Server, serve


@pytest.fixture(scope="module")
def hostile_server(tiny_repository: Path) -> Iterator[Server]:
    """Serve with memory of its own and a header timeout of two seconds."""
    with serve(tiny_repository, PREBLOCK_HEADER_TIMEOUT_SECONDS="2") as running:
        yield running


@pytest.fixture(scope="module")
def hostile_http(hostile_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hostile_server.address, timeout=60) as client:
        assert client.get("/readyz").status_code == 200
        yield client
