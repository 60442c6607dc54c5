"""The native request and answer. Oracles: Python's json and base64."""

import base64
import json
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import tests.support.profiles  # noqa: F401
from preblock.service.codecs import openai, tei
from preblock.service.codecs.native_json import (
    build_document,
    has_more_values,
    read_embed,
    read_json,
    write_json,
)
from preblock.service.core.errors import Invalid, TooLarge
from preblock.service.core.types import EmbedResult


def answer(vectors: NDArray[Any]) -> EmbedResult:
    ends = np.array([len(vectors)])
    tensors = {"embeddings": vectors[None]}
    return EmbedResult(model="m", version=3, dtype=vectors.dtype.name, tensors=tensors, lengths=ends, next_offset=ends)


def test_json_holds_every_value_exactly() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32).view(np.float32)
    wide = bits[np.isfinite(bits)][:600].reshape(2, 300)
    with np.errstate(over="ignore"):
        narrow = [wide.clip(-1e4, 1e4).astype(kind) for kind in (np.float16, ml_dtypes.bfloat16)]
    for vectors in (wide, *narrow):
        numbers, text = (
            json.loads(write_json(build_document(answer(vectors), encoding)))["embeddings"]
            for encoding in ("float", "base64")
        )
        assert np.array(numbers).astype(vectors.dtype).tobytes() == vectors.tobytes()
        assert base64.b64decode(text, validate=True) == vectors.tobytes()


def test_json_numbers_of_no_api_hold_infinity_or_nan() -> None:
    for value in (np.inf, -np.inf, np.nan):
        of = answer(vectors := np.array([[1, value]], np.float32))
        for write in (
            partial(build_document, of, "float"),
            partial(openai.write_vectors, "m", 1, "float", vectors, 2),
            partial(tei.write_embed_all, of),
        ):
            with pytest.raises(Invalid, match="encoding: got float, expected base64"):
                write()
        assert json.loads(write_json(build_document(of, "base64")))["embeddings"]


ROW = np.array([[1, 2, 3]])


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"lengths": [1]}, "field", "lengths"),
    ({"input_ids": [[1, 2]], "lengths": [2]}, "field", "lengths"),
    ({"input_ids": ROW, "lengths": [3]}, "input_ids shape", "(1, 3)"),
    ({"input_ids": ROW[0], "lengths": [1, 1]}, "lengths", "2 tokens in all"),
    ({"input_ids": ROW[0], "lengths": [0, 3]}, "lengths[0]", "0"),
    ({"input_ids": ROW[0], "lengths": [4, -1]}, "lengths[0]", "4"),
    ({"input_ids": ROW[0], "lengths": [2**63]}, "lengths[0]", f"{2**63}"),
    ({"input_ids": ROW[0], "lengths": 3}, "lengths", "3"),
    ({"input_ids": ROW[0], "lengths": []}, "lengths", "[]"),
    ({"input_ids": ROW[0], "lengths": ROW[0] * 1.0}, "lengths dtype", "float64"),
    ({"input_ids": ROW, "offset": ROW}, "offset shape", "(1, 3)"),
    ({"input_ids": ROW, "offset": ROW[0] == 1}, "offset dtype", "bool"),
    ({"input_ids": ROW, "dtype": ROW}, "dtype", "a tensor"),
]


def test_invalid_arrays_and_lengths_are_rejected() -> None:
    for fields, field, got in BAD:
        with pytest.raises(Invalid) as refused:
            read_embed(fields)
        assert (refused.value.field, refused.value.got) == (field, got)


def test_lengths_split_flat_ids_into_rows() -> None:
    for dtype in ("<i8", "<u2", ">i4", "<u8"):
        values = np.arange(6).astype(dtype)
        arrays = {"input_ids": values, "lengths": np.array([1, 3, 2], dtype), "offset": np.array(5, dtype)}
        request: Any = read_embed({**arrays, "position_ids": values}).request
        for rows in (request.input_ids, request.position_ids):
            assert (rows.values.tolist(), rows.lengths.tolist(), rows.flat) == ([0, 1, 2, 3, 4, 5], [1, 3, 2], False)
            assert rows.values.dtype == np.int64
        assert request.offset.tolist() == [5]


def test_unaligned_values_are_copied_to_aligned_memory() -> None:
    odd = np.frombuffer(bytes(1) + np.arange(3).tobytes(), "<i8", offset=1)
    assert not odd.flags.aligned
    request: Any = read_embed({"input_ids": odd}).request
    assert (request.input_ids.values.flags.aligned, request.input_ids.values.tolist()) == (True, [0, 1, 2])


TEXTS = st.text('a,"\\', max_size=8)
VALUES = st.recursive(
    st.integers(0, 9) | TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
)


def separators(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return max(0, len(value) - 1) + sum(map(separators, items))


@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
@given(value=VALUES)
def test_separators_inside_strings_are_not_counted(chunk: int, value: Any) -> None:
    text, values = json.dumps(value).encode(), separators(value) + 1
    assert has_more_values(text, values - 1, chunk)
    assert not has_more_values(text, values, chunk)


def test_too_many_values_are_rejected_before_parsing() -> None:
    fits = b'{"text": "%b", "input_ids": [1,2,3]}' % (b"," * 100)
    assert read_json(fits, 4)["input_ids"] == [1, 2, 3]
    with pytest.raises(TooLarge, match=r"^body: got more than 3 JSON values, expected at most 3 JSON values$"):
        read_json(fits, 3)
    with pytest.raises(TooLarge):
        read_json(b"[1,2,3,4 and no JSON", 3)
