"""Clients of the two servers, and the raw tables of a tiny model."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from preblock.export.exporter import export_loaded
from preblock.export.source import LoadedSource
from preblock.models.embeddings import GPT2Embeddings
from preblock.service.artifacts.manifest import GRAPH
from preblock.service.artifacts.records import Source
from tests.conftest import Server
from tests.support.protocols import Clients, connect


@pytest.fixture(scope="session")
def clients(server: Server) -> Iterator[Clients]:
    """Clients of `server`."""
    with connect(server) as connected:
        yield connected


@pytest.fixture(scope="session")
def tiny_clients(tiny_server: Server) -> Iterator[Clients]:
    """Clients of `tiny_server`."""
    with connect(tiny_server) as connected:
        yield connected


@pytest.fixture(scope="session")
def http(clients: Clients) -> httpx.Client:
    return clients.http


@pytest.fixture(scope="session")
def tiny(tiny_clients: Clients) -> httpx.Client:
    return tiny_clients.http


@pytest.fixture(scope="session")
def weighty_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One `gpt`, large enough that its weights lie in the data file; those of the tiny models lie in the graph."""
    root = tmp_path_factory.mktemp("weighty")
    export_loaded(LoadedSource(GPT2Embeddings(100, 32, 50), Source(kind="module")), "gpt", root)
    return root


@pytest.fixture(scope="session")
def tables(tiny_repository: Path) -> dict[str, NDArray[np.float32]]:
    """The raw tables `tokens` and `positions` of the tiny `gpt`, as onnx reads them from the artifact."""
    model = onnx.load(tiny_repository / "gpt" / "1" / GRAPH)
    arrays = {initializer.name: onnx.numpy_helper.to_array(initializer) for initializer in model.graph.initializer}
    return {table: np.array(arrays[f"frontend.{table}.weight"]) for table in ("tokens", "positions")}
