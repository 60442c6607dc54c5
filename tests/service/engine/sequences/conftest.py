"""An engine with tiny models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from preblock.service.engine.engine import Engine
from preblock.service.runtime.repository import Repository
from tests.support.engines import open_engine


@pytest.fixture(scope="module")
def sequence_repository(tiny_repository: Path) -> Repository:
    return Repository(tiny_repository)


@pytest.fixture
def sequence_engine(sequence_repository: Repository) -> Iterator[Engine]:
    with open_engine(sequence_repository, max_request_tokens=64) as engine:
        yield engine
