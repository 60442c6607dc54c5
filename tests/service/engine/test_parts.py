"""Vectors in place of token vectors, where no request over HTTP leads."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from preblock.service.core.errors import Invalid, TooLarge
from preblock.service.core.types import PartsRequest, RowPart
from preblock.service.engine.parts import assemble, place_vectors
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.repository import Repository

VECTORS = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def model(tiny_repository: Path) -> TokenModel:
    found = Repository(tiny_repository).get("gpt")
    assert isinstance(found, TokenModel)
    return found


def request(output: str = "embeddings") -> PartsRequest:
    part = RowPart(field="parts[0][0].vectors", vectors=VECTORS)
    return PartsRequest(rows=((part,),), outputs=(output,))


def changed(model: TokenModel, **fields: object) -> TokenModel:
    return replace(model, manifest=model.manifest.model_copy(update=fields))


def test_vectors_need_a_known_lookup(model: TokenModel) -> None:
    assert assemble(request(), model, 4).given is not None
    with pytest.raises(Invalid, match="expected token ids, since the token vectors of this model are unknown"):
        assemble(request(), changed(model, token_embeddings=None), 4)


@pytest.mark.parametrize("front_end", [None, {"arithmetic": "float16"}])
def test_vectors_enter_only_known_steps(model: TokenModel, front_end: dict[str, str] | None) -> None:
    unknown = changed(model, front_end=None if front_end is None else (model.manifest.front_end or {}) | front_end)
    with pytest.raises(Invalid, match="output embeddings of this model cannot be computed from given vectors"):
        assemble(request(), unknown, 4)


def test_vectors_are_placed_in_a_copy_of_a_read_only_array() -> None:
    stored = np.zeros((3, 4), np.float32)
    stored.flags.writeable = False
    index, values = np.array([4]), VECTORS.reshape(1, 4)
    assert place_vectors(stored, 5, index, values) is stored
    placed = place_vectors(stored, 3, index, values)
    assert np.array_equal(placed, np.stack([np.zeros(4), VECTORS, np.zeros(4)]))
    assert not stored.any()


def test_vectors_count_as_tokens(model: TokenModel) -> None:
    ids = RowPart(field="parts[0][0].input_ids", ids=np.array([1, 2]))
    three = replace(request(), rows=((ids, *request().rows[0]),))
    assert len(assemble(three, model, 3).input_ids.values) == 3
    with pytest.raises(TooLarge, match="parts: got more than 2 tokens, expected at most 2 tokens in a request"):
        assemble(three, model, 2)
