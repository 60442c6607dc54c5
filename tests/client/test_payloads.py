"""Payloads of engines."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from preblock.client.payloads import chat_part, input_embeds
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
