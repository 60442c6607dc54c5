"""A server of models with rotary angles, biases, levels, segments and images."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.api.http.routes.companions.calls import MODELS
from tests.support.artifacts import copy_artifact
from tests.support.protocols import Clients, connect
from tests.support.servers import serve


@pytest.fixture(scope="package")
def companion_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    root: Path = tmp_path_factory.mktemp("companions")
    for name in MODELS:
        copy_artifact(name, root)
    with serve(root) as server, connect(server) as connected:
        yield connected


@pytest.fixture
def companion_http(companion_clients: Clients) -> httpx.Client:
    return companion_clients.http
