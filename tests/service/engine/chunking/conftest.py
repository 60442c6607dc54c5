"""An engine with wide and long models."""

from collections.abc import Iterator

import pytest

from preblock.service.engine.engine import Engine
from tests.support.artifacts import copy_artifact
from tests.support.engines import open_engine


@pytest.fixture(scope="module")
def chunk_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("pieces")
    for name in ("gpt", "bert", "roberta"):
        copy_artifact(f"{name}-300x64x5000", root, name)
    copy_artifact("llama-300x64", root, "llama")
    copy_artifact("gpt-300x64x5000-huge-value", root, "large")
    with open_engine(root) as engine:
        yield engine
