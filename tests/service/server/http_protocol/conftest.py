"""A server of small models."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.artifacts import make_repository
from tests.support.servers import Server, serve


@pytest.fixture(scope="module")
def long_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a model of large answers to the longest requests."""
    return make_repository(tmp_path_factory.mktemp("connections"), gpt="gpt-500x96x900")


@pytest.fixture(scope="module")
def long_server(long_repository: Path) -> Iterator[Server]:
    with serve(long_repository) as server:
        yield server


@pytest.fixture(scope="module")
def long_client(long_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=long_server.address, timeout=30) as client:
        yield client
