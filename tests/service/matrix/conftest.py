"""Rows of the matrix, and servers that all rows share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.service.matrix.bodies import Ids
from tests.service.matrix.callers import Caller
from tests.service.matrix.code_paths import OTHERS, PREBLOCK, REPRESENTATIVES, UVICORN, CodePath, Servers
from tests.support.artifacts import read_tables
from tests.support.servers import Server, serve, serve_asgi
from tests.support.shared import Shared

Rows = tuple[CodePath, ...]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test with a `path` the rows of its folder."""
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", rows_of(metafunc.module.__name__), ids=lambda path: path.name)


def rows_of(module: str) -> Rows:
    return OTHERS if ".every_path." in module else REPRESENTATIVES


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Rows:
    """Return the rows of this folder."""
    return rows_of(request.module.__name__)


@contextmanager
def serve_rows(rows: Rows, models: Path, **environment: str) -> Iterator[Servers]:
    """Serve with `preblock serve`, and with an unmodified uvicorn where rows need it."""
    with ExitStack() as stack:
        servers: dict[str, Server] = {PREBLOCK: stack.enter_context(serve(models, **environment))}
        if any(path.server == UVICORN for path in rows):
            servers[UVICORN] = stack.enter_context(serve_asgi("uvicorn", models, **environment))
        yield servers


@pytest.fixture
def caller(path: CodePath, wide_server: Server, wide_repository: Path, shared: Shared) -> Iterator[Caller]:
    """Connect the row to a server without keys, and with limits that no test reaches."""
    servers = {PREBLOCK: wide_server}
    if path.server == UVICORN:
        limit = {"PREBLOCK_MAX_REQUEST_TOKENS": "120000"}
        servers[UVICORN] = shared.asgi_server("wide uvicorn", UVICORN, wide_repository, **limit)
    with path.open(servers) as caller:
        yield caller


@pytest.fixture(scope="package")
def expect(wide_repository: Path) -> Callable[..., bytes]:
    """Return a function that computes the vectors of ids at an offset from the raw tables."""
    tables = read_tables(wide_repository / "gpt" / "1")

    def vectors(ids: Ids, offset: int = 0) -> bytes:
        return (tables["tokens"][ids] + tables["positions"][offset + np.arange(ids.shape[1])]).tobytes()

    return vectors
