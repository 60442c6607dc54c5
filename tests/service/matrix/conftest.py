"""Rows of the matrix, and servers that all rows share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.service.matrix.code_paths import PATHS, Caller, CodePath, Ids
from tests.support.artifacts import copy_artifact, read_tables
from tests.support.servers import Server, serve


@pytest.fixture(params=PATHS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> CodePath:
    """Return one row."""
    found: CodePath = request.param
    return found


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with one `gpt` (V 50, D 768, M 700)."""
    root = tmp_path_factory.mktemp("matrix")
    copy_artifact("gpt-50x768x700", root, "gpt")
    return root


@pytest.fixture(scope="package")
def plain_server(models: Path) -> Iterator[Server]:
    """Serve it without keys, and with limits that no test reaches."""
    with serve(models, "--max-request-tokens", "120000") as server:
        yield server


@pytest.fixture
def caller(path: CodePath, plain_server: Server) -> Iterator[Caller]:
    """Connect the row to that server."""
    with path.open(plain_server) as caller:
        yield caller


@pytest.fixture(scope="package")
def expect(models: Path) -> Callable[..., bytes]:
    """Return a function that computes the vectors of ids at an offset from the raw tables."""
    tables = read_tables(models / "gpt" / "1")

    def vectors(ids: Ids, offset: int = 0) -> bytes:
        return (tables["tokens"][ids] + tables["positions"][offset + np.arange(ids.shape[1])]).tobytes()

    return vectors
