"""The native request and answer. Oracles: numpy's .npy files, Python's json and base64."""

import base64
import io
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from incipit.service.errors import Invalid, Malformed
from incipit.service.messages import Request, TokenAnswer
from incipit.service.wire.native import (
    answer_json,
    raw_bytes,
    read_embed,
    read_json,
    read_npy,
    read_query,
    write_json,
    write_npy,
)


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version)
    return stream.getvalue()


def answer(embeddings: NDArray[Any], dtype: str = "float32", lengths: tuple[int, ...] = (2,)) -> TokenAnswer:
    """Return an answer of one rectangle or of ragged rows."""
    equal = len(set(lengths)) == 1
    shape = (len(lengths), lengths[0], -1) if equal else embeddings.shape
    return TokenAnswer(
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


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["<i8", ">i4", "u1", "<f4", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_read_npy_reads_what_numpy_writes(version: tuple[int, int], dtype: str, order: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype, order=order)
    found = read_npy(saved(array, version))
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


def test_read_npy_does_not_copy() -> None:
    body = saved(np.arange(6))
    assert np.shares_memory(read_npy(body), np.frombuffer(body, np.uint8))


def test_read_npy_reads_no_pickle() -> None:
    with pytest.raises(Malformed, match=r"allowed an integer array in \.npy format"):
        read_npy(saved(np.array([{}], dtype=object)))


@pytest.mark.parametrize("cut", [0, 5, 6, 8, 9, 10, 40, 127, 128, 129, 175])
def test_read_npy_refuses_every_cut(cut: int) -> None:
    body = saved(np.arange(6))
    assert len(body) == 176
    with pytest.raises(Malformed, match=r"^body: got no \.npy"):
        read_npy(body[:cut])


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("[1,2]", [1, 2]), ("[[0,1]]", [[0, 1]]), ("null", None), ("-1", -1), ('"x"', "x"), (" 5 ", 5)],
)
def test_query_values_are_json(text: str, value: Any) -> None:
    assert read_query({"offset": text}) == {"offset": value}


def test_names_in_the_query_are_taken_as_they_are() -> None:
    assert read_query({"dtype": "float16", "encoding": "[1]"}) == {"dtype": "float16", "encoding": "[1]"}


@pytest.mark.parametrize("text", ["", "x", "[1", "1,2", "\ud800", "NaN"])
def test_a_query_value_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(Malformed, match=r"^offset: got "):
        read_query({"offset": text})


@pytest.mark.parametrize("body", [b"", b"1", b"[]", b"null", b'"x"', b"{", b"\xff"])
def test_read_json_wants_an_object(body: bytes) -> None:
    with pytest.raises(Malformed, match="allowed a JSON object"):
        read_json(body)


def test_read_embed_has_the_documented_defaults() -> None:
    embed = read_embed({"input_ids": [1]})
    assert (embed.encoding, embed.request.dtype) == ("base64", "float32")
    request = embed.request
    assert isinstance(request, Request)
    assert [request.offset, request.position_ids, request.attention_mask] == [None] * 3
    assert (request.indices, request.outputs) == ({}, ("embeddings",))


def test_ids_may_not_come_twice() -> None:
    with pytest.raises(Invalid, match="input_ids: got one in the query and one in the body"):
        read_embed({"input_ids": [1]}, np.array([1]))


def test_base64_holds_the_bytes() -> None:
    vectors = random_vectors()
    document = json.loads(write_json(answer_json(answer(vectors), "base64")))
    assert base64.b64decode(document["embeddings"], validate=True) == vectors.tobytes()


def test_text_holds_every_finite_float32_exactly() -> None:
    vectors = random_vectors()
    document = json.loads(write_json(answer_json(answer(vectors), "float")))
    found = np.array(document["embeddings"], np.float64).astype(np.float32)
    assert found.tobytes() == vectors.tobytes()


@pytest.mark.parametrize(("dtype", "numpy_type"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_text_holds_narrow_types_exactly(dtype: str, numpy_type: Any) -> None:
    vectors = np.random.default_rng(0).standard_normal((2, 300)).astype(numpy_type)
    document = json.loads(write_json(answer_json(answer(vectors, dtype), "float")))
    assert np.array(document["embeddings"]).astype(numpy_type).tobytes() == vectors.tobytes()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_text_refuses_what_json_cannot_hold(value: float) -> None:
    vectors = np.array([[1, value]], np.float32)
    with pytest.raises(Invalid, match="encoding: got float, allowed base64"):
        answer_json(answer(vectors, lengths=(1,)), "float")
    assert json.loads(write_json(answer_json(answer(vectors, lengths=(1,)), "base64")))["embeddings"]


def test_lengths_are_told_where_they_differ() -> None:
    ragged = answer_json(answer(random_vectors(3), lengths=(1, 2)), "base64")
    assert json.loads(write_json(ragged))["lengths"] == [1, 2]
    assert "lengths" not in answer_json(answer(random_vectors(2), lengths=(1, 1)), "base64")


def test_raw_bytes_are_the_array_itself() -> None:
    vectors = random_vectors()
    view = raw_bytes(vectors)
    assert np.shares_memory(np.frombuffer(view, np.uint8), vectors)
    assert bytes(view) == vectors.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("lengths", [(1, 1), (2,), (1, 2)])
def test_write_npy_is_read_by_numpy(dtype: str, lengths: tuple[int, ...]) -> None:
    vectors = np.random.default_rng(0).standard_normal((sum(lengths), 5)).astype(dtype)
    written = answer(vectors, dtype, lengths).tensors["embeddings"]
    found = np.load(io.BytesIO(write_npy(written)), allow_pickle=False)
    assert (found.dtype, found.shape, found.tobytes()) == (np.dtype(dtype), written.shape, vectors.tobytes())


def test_npy_has_no_bfloat16() -> None:
    with pytest.raises(Invalid, match=r"dtype: got bfloat16, allowed float32 or float16 in \.npy"):
        write_npy(np.zeros((2, 2), ml_dtypes.bfloat16))
