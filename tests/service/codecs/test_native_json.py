"""The native request and answer. Oracles: Python's json and base64."""

import base64
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.codecs.native_json import read_embed, read_json, read_query
from preblock.service.codecs.native_json_response import build_document, write_json
from preblock.service.core.errors import Invalid, Malformed
from preblock.service.core.results import EmbedResult
from preblock.service.core.types import TokenRequest


def answer(embeddings: NDArray[Any], dtype: str = "float32", lengths: tuple[int, ...] = (2,)) -> EmbedResult:
    """Return an answer of one rectangle or of ragged rows."""
    equal = len(set(lengths)) == 1
    shape = (len(lengths), lengths[0], -1) if equal else embeddings.shape
    return EmbedResult(
        model="m",
        version=3,
        dtype=dtype,
        tensors={"embeddings": embeddings.reshape(shape)},
        lengths=np.array(lengths),
        next_offset=np.array(lengths),
    )


def random_vectors(tokens: int = 2) -> NDArray[np.float32]:
    bits = np.random.default_rng(0).integers(0, 2**32, tokens * 500, np.uint32)
    vectors = bits.view(np.float32)
    return vectors[np.isfinite(vectors)][: tokens * 300].reshape(tokens, 300)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("[1,2]", [1, 2]), ("[[0,1]]", [[0, 1]]), ("-1", -1), ('"x"', "x"), (" 5 ", 5)],
)
def test_query_values_are_json(text: str, value: Any) -> None:
    assert read_query({"offset": text}) == {"offset": value}


def test_query_options_are_taken_verbatim() -> None:
    assert read_query({"dtype": "float16", "encoding": "[1]"}) == {"dtype": "float16", "encoding": "[1]"}


@pytest.mark.parametrize("text", ["", "x", "[1", "1,2", "\ud800", "NaN"])
def test_invalid_query_json_is_rejected(text: str) -> None:
    with pytest.raises(Malformed, match=r"^offset: got "):
        read_query({"offset": text})


@pytest.mark.parametrize("body", [b"", b"1", b"[]", b"null", b'"x"', b"{", b"\xff"])
def test_body_without_json_object_is_rejected(body: bytes) -> None:
    with pytest.raises(Malformed, match="expected a JSON object"):
        read_json(body)


def test_read_embed_has_the_documented_defaults() -> None:
    embed = read_embed({"input_ids": [1]})
    assert (embed.encoding, embed.request.dtype) == ("base64", "float32")
    request = embed.request
    assert isinstance(request, TokenRequest)
    assert [request.offset, request.position_ids, request.attention_mask] == [None] * 3
    assert (request.indices, request.outputs) == ({}, ("embeddings",))


def test_base64_holds_vector_bytes() -> None:
    vectors = random_vectors()
    document = json.loads(write_json(build_document(answer(vectors), "base64")))
    assert base64.b64decode(document["embeddings"], validate=True) == vectors.tobytes()


def test_json_floats_hold_every_float32_exactly() -> None:
    vectors = random_vectors()
    document = json.loads(write_json(build_document(answer(vectors), "float")))
    found = np.array(document["embeddings"], np.float64).astype(np.float32)
    assert found.tobytes() == vectors.tobytes()


@pytest.mark.parametrize(("dtype", "numpy_type"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_json_floats_hold_narrow_dtypes_exactly(dtype: str, numpy_type: Any) -> None:
    vectors = np.random.default_rng(0).standard_normal((2, 300)).astype(numpy_type)
    document = json.loads(write_json(build_document(answer(vectors, dtype), "float")))
    assert np.array(document["embeddings"]).astype(numpy_type).tobytes() == vectors.tobytes()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_json_floats_reject_infinity_and_nan(value: float) -> None:
    vectors = np.array([[1, value]], np.float32)
    with pytest.raises(Invalid, match="encoding: got float, expected base64"):
        build_document(answer(vectors, lengths=(1,)), "float")
    assert json.loads(write_json(build_document(answer(vectors, lengths=(1,)), "base64")))["embeddings"]


def test_lengths_are_reported_if_they_differ() -> None:
    ragged = build_document(answer(random_vectors(3), lengths=(1, 2)), "base64")
    assert json.loads(write_json(ragged))["lengths"] == [1, 2]
    assert "lengths" not in build_document(answer(random_vectors(2), lengths=(1, 1)), "base64")


ROW = np.array([[1, 2, 3]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": [1]}, "unknown field lengths; expected input_ids, "),
        ({"input_ids": [[1, 2]], "lengths": [2]}, "unknown field lengths; expected input_ids, "),
        ({"input_ids": ROW, "lengths": [3]}, r"input_ids shape: got \(1, 3\), expected \(tokens,\) beside lengths"),
        (
            {"input_ids": ROW[0], "lengths": [1, 1]},
            "lengths: got 2 tokens in all, expected 3, as many as input_ids has",
        ),
        ({"input_ids": ROW[0], "lengths": [0, 3]}, r"lengths\[0\]: got 0, expected 1 to 3, as many as input_ids has"),
        ({"input_ids": ROW[0], "lengths": [4, -1]}, r"lengths\[0\]: got 4, expected 1 to 3"),
        ({"input_ids": ROW[0], "lengths": [3] * 2**10}, "lengths: got 3072 tokens in all, expected 3"),
        (
            {"input_ids": ROW[0], "lengths": [2**63]},
            r"lengths\[0\]: got 9223372036854775808, expected a 64-bit integer",
        ),
        ({"input_ids": ROW[0], "lengths": 3}, "lengths: got 3, expected a list of integers"),
        ({"input_ids": ROW[0], "lengths": []}, r"lengths: got \[\], expected a list of integers"),
        ({"input_ids": ROW[0], "lengths": ROW}, r"lengths shape: got \(1, 3\), expected one dimension"),
        ({"input_ids": ROW[0], "lengths": ROW[0] * 1.0}, "lengths dtype: got float64, expected an integer type"),
        ({"input_ids": ROW, "offset": ROW}, r"offset shape: got \(1, 3\), expected one dimension"),
        ({"input_ids": ROW, "offset": ROW[0] == 1}, "offset dtype: got bool, expected an integer type"),
        ({"input_ids": ROW, "dtype": ROW}, "dtype: got a tensor, expected a query parameter"),
        ({"input_ids": ROW, "encoding": ROW}, "encoding: got a tensor, expected a query parameter"),
        ({"input_ids": ROW, "nope": ROW}, "unknown field nope; expected input_ids, "),
        ({"position_ids": ROW}, "input_ids, text or parts is required: rows of token ids"),
    ],
)
def test_invalid_arrays_and_lengths_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=f"^{message}"):
        read_embed(fields)


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
