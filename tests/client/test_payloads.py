"""Payloads of engines: shapes, ids and wrong parts."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from preblock.client.errors import RequestError
from preblock.client.payloads import chat_part, input_embeds, prompt_table
from preblock.client.results import Embeddings

VECTORS = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_chat_part_holds_prompt_as_data() -> None:
    assert chat_part("UEsD") == {"type": "prompt_embeds", "data": "UEsD"}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_input_embeds_are_python_floats_per_row(dtype: Any) -> None:
    offsets = np.array([1, 2])
    embeddings = Embeddings("m", 1, VECTORS.astype(dtype), np.array([1, 2]), offsets, "input of block 0")
    found = input_embeds(embeddings)
    assert found == [[[0.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]]
    assert {type(number) for row in found for vector in row for number in vector} == {float}


def test_prompt_table_numbers_vectors_after_vocabulary() -> None:
    prompt = prompt_table([[7, 8], VECTORS[:1], np.array([9]), VECTORS[1:].astype(np.float16)], 10)
    assert prompt.input_ids.dtype == np.int32
    assert prompt.input_ids.tolist() == [7, 8, 10, 9, 11, 12]
    assert (prompt.table.dtype.name, prompt.table.shape) == ("float32", (1, 3, 2))
    assert np.array_equal(prompt.table[0], VECTORS)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[1], [-1], VECTORS], "parts[1]: got -1, expected ids from 0 to 9"),
        ([VECTORS, [3, 10]], "parts[1]: got 10, expected ids from 0 to 9"),
        ([[1, 2]], "parts: got token ids alone, expected a part with vectors"),
        ([VECTORS[0]], "parts[0]: got an array (2,), expected token ids, or vectors (n, width)"),
        ([VECTORS, VECTORS[:, :1]], "parts[1]: got an array (3, 1), expected token ids, or vectors (n, 2)"),
    ],
)
def test_prompt_table_rejects_wrong_parts(parts: list[Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        prompt_table(parts, 10)
    assert str(refused.value) == message
