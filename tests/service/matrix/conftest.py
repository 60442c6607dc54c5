"""Rows of the matrix, and servers that all rows share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.service.matrix.bodies import Ids
from tests.service.matrix.callers import Caller
from tests.service.matrix.code_paths import PATHS, PREBLOCK, UVICORN, CodePath, Servers
from tests.support.artifacts import read_tables
from tests.support.servers import Server, serve, serve_asgi


@contextmanager
def serve_both(models: Path, **environment: str) -> Iterator[Servers]:
    """Serve with `preblock serve` and with an unmodified uvicorn."""
    with serve(models, **environment) as own, serve_asgi("uvicorn", models, **environment) as plain:
        yield {PREBLOCK: own, UVICORN: plain}


@pytest.fixture(params=PATHS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> CodePath:
    """Return one row."""
    found: CodePath = request.param
    return found


@pytest.fixture(scope="package")
def plain_servers(wide_server: Server, wide_repository: Path) -> Iterator[Servers]:
    """Serve without keys, and with limits that no test reaches."""
    with serve_asgi("uvicorn", wide_repository, PREBLOCK_MAX_REQUEST_TOKENS="120000") as plain:
        yield {PREBLOCK: wide_server, UVICORN: plain}


@pytest.fixture
def caller(path: CodePath, plain_servers: Servers) -> Iterator[Caller]:
    """Connect the row to its server."""
    with path.open(plain_servers) as caller:
        yield caller


@pytest.fixture(scope="package")
def expect(wide_repository: Path) -> Callable[..., bytes]:
    """Return a function that computes the vectors of ids at an offset from the raw tables."""
    tables = read_tables(wide_repository / "gpt" / "1")

    def vectors(ids: Ids, offset: int = 0) -> bytes:
        return (tables["tokens"][ids] + tables["positions"][offset + np.arange(ids.shape[1])]).tobytes()

    return vectors
