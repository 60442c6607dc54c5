"""A server and a session of the stored model with n-gram embeddings."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import preblock
from preblock.client.sync_client import Client
from preblock.service.runtime.session import Session
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, serve


@pytest.fixture(scope="module")
def ngram_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ngrams")
    copy_artifact("ngrams", root)
    copy_artifact("gpt", root)
    return root


@pytest.fixture(scope="module")
def ngram_server(ngram_repository: Path) -> Iterator[Server]:
    with serve(ngram_repository) as server:
        yield server


@pytest.fixture
def ngram_client(ngram_server: Server) -> Iterator[Client]:
    with preblock.connect(ngram_server.address) as client:
        yield client


@pytest.fixture(scope="module")
def ngram_session(ngram_repository: Path) -> Session:
    return Session(ngram_repository / "ngrams/1", graph="ngrams.onnx")
