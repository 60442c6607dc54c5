"""Calls of any shape, and the chunks of large ones. Oracle: the plain graph in a bare onnxruntime."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.names import EMBEDDINGS
from preblock.service.runtime.model import TokenModel, split_feeds
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.session import SLOW_ON_CPU

Offset = NDArray[np.int64]


@pytest.fixture(scope="module")
def models(model_repository: Path) -> Repository:
    return Repository(model_repository)


def feeds_of(model: TokenModel, shape: tuple[int, int], offset: Offset) -> dict[str, NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    limits = {"input_ids": model.manifest.vocab_size, **model.manifest.indices}
    return {name: generator.integers(0, limit, shape) for name, limit in limits.items()} | {"offset": offset}


@pytest.mark.parametrize("name", ["gpt2-small", "minilm"])
@pytest.mark.parametrize(
    ("shape", "offset"),
    [
        ((20, 300), np.array([5])),
        ((18, 256), np.arange(18)),
        ((4177, 1), np.arange(4177) % 300),
        ((3, 5), np.array([5])),
        ((0, 5), np.array([5])),
        ((5, 0), np.array([5])),
    ],
)
def test_call_of_any_shape_equals_plain_graph(
    models: Repository, name: str, shape: tuple[int, int], offset: Offset
) -> None:
    model = models.get(name)
    bare = onnxruntime.InferenceSession(
        models.root / name / "1" / "model.onnx", providers=[CPU], disabled_optimizers=SLOW_ON_CPU
    )
    feeds = feeds_of(model, shape, offset)
    (expected,) = bare.run([EMBEDDINGS], {node.name: feeds[node.name] for node in bare.get_inputs()})
    found = model.run(feeds, (EMBEDDINGS,))[EMBEDDINGS]
    assert np.array_equal(found, expected)
    assert found.flags.c_contiguous


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 3), [(3, 3), (3, 3), (2, 3)]),
        ((7, 4), [(2, 4), (2, 4), (2, 4), (1, 4)]),
        ((2, 20), [(1, 10), (1, 10), (1, 10), (1, 10)]),
        ((2, 21), [(1, 11), (1, 10), (1, 11), (1, 10)]),
        ((25, 1), [(9, 1), (9, 1), (7, 1)]),
        ((1, 11), [(1, 11)]),
    ],
)
def test_feeds_are_split_into_few_and_equal_chunks(shape: tuple[int, int], expected: list[tuple[int, int]]) -> None:
    ids = np.arange(shape[0] * shape[1]).reshape(shape)
    found = list(split_feeds({"input_ids": ids, "offset": np.array([3])}, 11))
    assert [piece["input_ids"].shape for piece in found] == expected
    assert np.concatenate([piece["input_ids"].ravel() for piece in found]).tolist() == ids.ravel().tolist()
    begins = (piece["input_ids"][0, 0] % shape[1] if shape[1] > 11 else 0 for piece in found)
    assert [piece["offset"].tolist() for piece in found] == [[3 + begin] for begin in begins]
