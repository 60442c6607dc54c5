"""The native request and answer. Oracles: Python's json and base64."""

import base64
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.codecs.native_json import build_document, read_embed, read_json, read_query, write_json
from preblock.service.core.errors import Invalid, Malformed
from preblock.service.core.types import EmbedResult, TokenRequest


def answer(embeddings: NDArray[Any], dtype: str = "float32", lengths: tuple[int, ...] = (2,)) -> EmbedResult:
    """Return an answer of one rectangle or of ragged rows."""
    equal = len(set(lengths)) == 1
    tensors = {"embeddings": embeddings.reshape((len(lengths), lengths[0], -1) if equal else embeddings.shape)}
    ends = np.array(lengths)
    return EmbedResult(model="m", version=3, dtype=dtype, tensors=tensors, lengths=ends, next_offset=ends)


def random_vectors(tokens: int = 2) -> NDArray[np.float32]:
    bits = np.random.default_rng(0).integers(0, 2**32, tokens * 500, np.uint32)
    vectors = bits.view(np.float32)
    return vectors[np.isfinite(vectors)][: tokens * 300].reshape(tokens, 300)


def test_query_values_are_json() -> None:
    for text, value in (("5", 5), ("[1,2]", [1, 2]), ("[[0,1]]", [[0, 1]]), ("-1", -1), ('"x"', "x"), (" 5 ", 5)):
        assert read_query({"offset": text}) == {"offset": value}
    for text in ("", "x", "[1", "1,2", "\ud800", "NaN"):
        with pytest.raises(Malformed, match=r"^offset: got "):
            read_query({"offset": text})
    assert read_query({"dtype": "float16", "encoding": "[1]"}) == {"dtype": "float16", "encoding": "[1]"}


def test_body_without_json_object_is_rejected() -> None:
    for body in (b"", b"1", b"[]", b"null", b'"x"', b"{", b"\xff"):
        with pytest.raises(Malformed, match="expected a JSON object"):
            read_json(body)


def test_read_embed_has_the_documented_defaults() -> None:
    embed = read_embed({"input_ids": [1]})
    assert (embed.encoding, embed.request.dtype) == ("base64", "float32")
    request = embed.request
    assert isinstance(request, TokenRequest)
    assert [request.offset, request.position_ids, request.attention_mask] == [None] * 3
    assert (request.indices, request.outputs) == ({}, ("embeddings",))


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_json_holds_every_value_exactly(kind: Any) -> None:
    narrow = np.random.default_rng(0).standard_normal((2, 300)).astype(kind)
    vectors = random_vectors() if kind is np.float32 else narrow
    of = answer(vectors, np.dtype(kind).name)
    numbers, text = (json.loads(write_json(build_document(of, encoding))) for encoding in ("float", "base64"))
    assert np.array(numbers["embeddings"]).astype(kind).tobytes() == vectors.tobytes()
    assert base64.b64decode(text["embeddings"], validate=True) == vectors.tobytes()


def test_json_floats_reject_infinity_and_nan() -> None:
    for value in (np.inf, -np.inf, np.nan):
        of = answer(np.array([[1, value]], np.float32), lengths=(1,))
        with pytest.raises(Invalid, match="encoding: got float, expected base64"):
            build_document(of, "float")
        assert json.loads(write_json(build_document(of, "base64")))["embeddings"]


def test_lengths_are_reported_if_they_differ() -> None:
    ragged = build_document(answer(random_vectors(3), lengths=(1, 2)), "base64")
    assert json.loads(write_json(ragged))["lengths"] == [1, 2]
    assert "lengths" not in build_document(answer(random_vectors(2), lengths=(1, 1)), "base64")


ROW = np.array([[1, 2, 3]])


@pytest.mark.parametrize(
    ("fields", "field", "got"),
    [
        ({"lengths": [1]}, "field", "lengths"),
        ({"input_ids": [[1, 2]], "lengths": [2]}, "field", "lengths"),
        ({"input_ids": ROW, "lengths": [3]}, "input_ids shape", "(1, 3)"),
        ({"input_ids": ROW[0], "lengths": [1, 1]}, "lengths", "2 tokens in all"),
        ({"input_ids": ROW[0], "lengths": [0, 3]}, "lengths[0]", "0"),
        ({"input_ids": ROW[0], "lengths": [4, -1]}, "lengths[0]", "4"),
        ({"input_ids": ROW[0], "lengths": [3] * 2**10}, "lengths", "3072 tokens in all"),
        ({"input_ids": ROW[0], "lengths": [2**63]}, "lengths[0]", f"{2**63}"),
        ({"input_ids": ROW[0], "lengths": 3}, "lengths", "3"),
        ({"input_ids": ROW[0], "lengths": []}, "lengths", "[]"),
        ({"input_ids": ROW[0], "lengths": ROW}, "lengths shape", "(1, 3)"),
        ({"input_ids": ROW[0], "lengths": ROW[0] * 1.0}, "lengths dtype", "float64"),
        ({"input_ids": ROW, "offset": ROW}, "offset shape", "(1, 3)"),
        ({"input_ids": ROW, "offset": ROW[0] == 1}, "offset dtype", "bool"),
        ({"input_ids": ROW, "dtype": ROW}, "dtype", "a tensor"),
        ({"input_ids": ROW, "nope": ROW}, "field", "nope"),
        ({"position_ids": ROW}, "input_ids", "nothing"),
    ],
)
def test_invalid_arrays_and_lengths_are_rejected(fields: dict[str, Any], field: str, got: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_embed(fields)
    assert (refused.value.field, refused.value.got) == (field, got)


@pytest.mark.parametrize("dtype", ["<i8", "<u2", ">i4", "<u8"])
def test_lengths_split_flat_ids_into_rows(dtype: str) -> None:
    values = np.arange(6).astype(dtype)
    arrays = {"input_ids": values, "lengths": np.array([1, 3, 2], dtype), "offset": np.array(5, dtype)}
    request = read_embed({**arrays, "position_ids": values}).request
    assert isinstance(request, TokenRequest)
    for rows in (request.input_ids, request.position_ids):
        assert rows is not None
        assert (rows.values.tolist(), rows.lengths.tolist(), rows.flat) == ([0, 1, 2, 3, 4, 5], [1, 3, 2], False)
        assert rows.values.dtype == np.int64
    assert request.offset is not None
    assert request.offset.tolist() == [5]


def test_unaligned_values_are_copied_to_aligned_memory() -> None:
    odd = np.frombuffer(bytes(1) + np.arange(3).tobytes(), "<i8", offset=1)
    assert not odd.flags.aligned
    request = read_embed({"input_ids": odd}).request
    assert isinstance(request, TokenRequest)
    assert request.input_ids.values.flags.aligned
    assert request.input_ids.values.tolist() == [0, 1, 2]
