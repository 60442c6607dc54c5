"""An engine with tiny models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from preblock.service.engine.engine import Engine
from tests.support.engines import open_engine


@pytest.fixture(scope="module")
def stream_engine(tiny_repository: Path) -> Iterator[Engine]:
    with open_engine(tiny_repository, max_request_tokens=6) as engine:
        yield engine
