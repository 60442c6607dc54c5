"""A server with shared memory, and tritonclient over each protocol."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
import tritonclient.http

from tests.clients.shared_memory.shared_client import MAX_BYTES, Client, clients_of
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, serve


@pytest.fixture(scope="module")
def shared_server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("shared")
    for model in tiny_repository.iterdir():
        (root / model.name).symlink_to(model)
    copy_artifact("gpt-50x768x700", root, "wide")
    with serve(root, "--max-shared-memory-bytes", str(MAX_BYTES)) as server:
        yield server


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def memory_client(request: pytest.FixtureRequest, shared_server: Server) -> Iterator[Client]:
    with clients_of(shared_server, request.param) as opened:
        yield opened
