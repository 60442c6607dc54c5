"""Sentence embeddings of static embedding models, through OpenAI's own client. Oracles: model2vec, and torch."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from model2vec import StaticModel
from numpy.typing import NDArray

from preblock.export.exporter import export
from tests.clients.openai_api.responses import connected
from tests.support.exports import translations  # noqa: F401
from tests.support.servers import serve
from tests.support.static_models import WIDTH, make_table, make_tokenizer, save_bag, save_mapped

TEXTS = ["hello world", "abc ? jih", "a", "hello hello !! b", "cab fed"]
"""Some have unknown words: model2vec leaves their tokens out, sentence-transformers does not."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("static")
    return {"mapped": save_mapped(root / "mapped"), "bag": save_bag(root / "bag")}


@pytest.fixture(scope="module")
def client(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    root = tmp_path_factory.mktemp("repository")
    for name, source in sources.items():
        export(str(source), name, root)
    with serve(root) as server, connected(server) as opened:
        yield opened


def embed(client: openai.OpenAI, model: str, texts: Any, **options: Any) -> NDArray[np.float32]:
    response = client.embeddings.create(model=model, input=texts, **options)
    return np.array([item.embedding for item in response.data], np.float32)


def bag_of(texts: list[str]) -> NDArray[np.float32]:
    """Return the embeddings of the module that sentence-transformers uses."""
    bag = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(make_table()).double())
    rows = [encoding.ids for encoding in make_tokenizer().encode_batch(texts, add_special_tokens=False)]
    starts = torch.tensor([0, *map(len, rows[:-1])]).cumsum(0)
    found: NDArray[np.float32] = bag(torch.tensor(list(chain.from_iterable(rows))), starts).float().numpy()
    return found


@pytest.mark.parametrize("dimensions", [4, WIDTH])
def test_embeddings_match_libraries(dimensions: int, client: openai.OpenAI, sources: dict[str, Path]) -> None:
    """Oracles: model2vec, and the module that sentence-transformers uses."""
    oracle = StaticModel.from_pretrained(sources["mapped"], dimensionality=dimensions).encode(TEXTS)
    found = embed(client, "mapped", TEXTS, dimensions=dimensions)
    assert found.shape == (len(TEXTS), dimensions)
    np.testing.assert_allclose(found, oracle, rtol=1e-5, atol=2e-7)
    found = embed(client, "bag", TEXTS, dimensions=dimensions)
    np.testing.assert_allclose(found, bag_of(TEXTS)[:, :dimensions], rtol=1e-6)


def test_special_tokens_are_added_on_request(client: openai.OpenAI) -> None:
    added = embed(client, "bag", ["a"], extra_body={"add_special_tokens": True})
    assert np.array_equal(added, embed(client, "bag", [make_tokenizer().encode("a").ids]))


@pytest.mark.parametrize(
    ("fields", "param", "got"),
    [
        *(({"dimensions": value}, "dimensions", f"got {value}, expected 1 to 8") for value in (0, 9, True, 2.0)),
        ({"dimensions": 3, "pooling": "none"}, "dimensions", "got 3, expected 8"),
        ({"input": ["a", "? !"]}, "input[1]", "got no known token"),
        ({"input": [[4], [1]]}, "input[1]", "got no known token"),
        ({"input": "? " * 8 + "a", "truncate": "right"}, "input[0]", "got no known token"),
    ],
)
def test_invalid_request_is_rejected_with_field(
    fields: dict[str, Any], param: str, got: str, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="mapped", input="a", extra_body=fields)
    assert raised.value.param == param
    assert f"{param}: {got}" in raised.value.message
