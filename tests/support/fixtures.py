"""Clients of the two servers, and the raw tables of a tiny model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.artifacts import Floats, copy_artifact, make_repository, read_tables
from tests.support.protocols import Clients, connect
from tests.support.servers import Server, serve
from tests.support.shared import Shared


@pytest.fixture(scope="session")
def model_clients(model_server: Server) -> Iterator[Clients]:
    """Clients of `server`."""
    with connect(model_server) as connected:
        yield connected


@pytest.fixture(scope="session")
def tiny_clients(tiny_server: Server) -> Iterator[Clients]:
    """Clients of `tiny_server`."""
    with connect(tiny_server) as connected:
        yield connected


@pytest.fixture(scope="session")
def model_http(model_clients: Clients) -> httpx.Client:
    return model_clients.http


@pytest.fixture(scope="session")
def tiny_http(tiny_clients: Clients) -> httpx.Client:
    return tiny_clients.http


@pytest.fixture(scope="session")
def counted_server(tiny_repository: Path) -> Iterator[Server]:
    """Serve the tiny models for this worker only: tests compare its metrics and open streams."""
    with serve(tiny_repository) as server:
        yield server


@pytest.fixture(scope="session")
def counted_clients(counted_server: Server) -> Iterator[Clients]:
    """Clients of `counted_server`."""
    with connect(counted_server) as connected:
        yield connected


@pytest.fixture(scope="session")
def counted_http(counted_clients: Clients) -> httpx.Client:
    return counted_clients.http


@pytest.fixture(scope="session")
def example_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve tiny models under the names in the examples of the OpenAPI document; models can be loaded and unloaded."""
    names = {"gpt2-small": "gpt", "minilm": "bert", "t5-small": "t5"}
    root = make_repository(tmp_path_factory.mktemp("examples"), **names)
    folder = copy_artifact("llama", root, "potion")
    document = json.loads((folder / "manifest.json").read_text())
    document["sentence"] = {"pooling": "mean", "normalize": True, "ignored_ids": []}
    shutil.copy(root / "minilm/1/tokenizer.json", folder)
    reader = json.loads((root / "minilm/1/manifest.json").read_text())
    document["files"]["tokenizer.json"] = reader["files"]["tokenizer.json"]
    (folder / "manifest.json").write_text(json.dumps(document))
    options = "--model-control", "explicit", "--load-model", "*", "--tei", "potion"
    with serve(root, *options, "--max-shared-memory-bytes", "1048576") as server:
        yield server


@pytest.fixture(scope="session")
def weighty_repository(shared: Shared) -> Path:
    """Return one `gpt` with weights in the data file; those of the tiny models lie in the graph."""
    return shared.make("weighty", lambda root: make_repository(root, gpt="gpt-100x32x50"))


@pytest.fixture(scope="session")
def wide_repository(shared: Shared) -> Path:
    """Return one `gpt` with wide vectors (V 50, D 768, M 700), for large answers."""
    return shared.make("wide", lambda root: make_repository(root, gpt="gpt-50x768x700"))


@pytest.fixture(scope="session")
def wide_server(wide_repository: Path, shared: Shared) -> Server:
    """Serve the wide `gpt`, with limits beyond every test, for all workers."""
    return shared.server("wide", wide_repository, PREBLOCK_MAX_REQUEST_TOKENS="120000")


@pytest.fixture(scope="session")
def tiny_tables(tiny_repository: Path) -> dict[str, Floats]:
    """The raw tables `tokens` and `positions` of the tiny `gpt`."""
    return read_tables(tiny_repository / "gpt" / "1")
