"""Large answers: computed in pieces, with the bits of one run. Oracle: onnxruntime over the whole."""

import numpy as np
import pytest

from preblock.service.core.results import ChunkedTensor
from preblock.service.core.types import TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import fast_path_of
from preblock.service.runtime.session import INLINE_MAX_VALUES
from tests.service.engine.chunking.requests import CASES, PADDING, TYPES, WIDTH, embed, rows_of, whole


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["gpt", "bert", "llama"])
@pytest.mark.parametrize("dtype", TYPES)
def test_chunks_equal_single_run_bit_for_bit(chunk_engine: Engine, case: str, model: str, dtype: str) -> None:
    lengths, offset = CASES[case]
    request = TokenRequest(
        input_ids=rows_of(lengths), offset=None if offset is None else np.array(offset), dtype=dtype, chunks="sent"
    )
    answer = embed(chunk_engine, model, request)
    pieces = answer.tensors["embeddings"]
    assert isinstance(pieces, ChunkedTensor)
    equal = len(set(lengths)) == 1
    assert pieces.shape == ((len(lengths), lengths[0], WIDTH) if equal else (sum(lengths), WIDTH))
    parts = list(pieces)
    assert max(part.size for part in parts) <= INLINE_MAX_VALUES
    assert sum(part.nbytes for part in parts) == pieces.nbytes
    expected = whole(chunk_engine, model, request).astype(TYPES[dtype])
    assert b"".join(part.tobytes() for part in parts) == expected.tobytes()


def test_rotary_family_has_fast_path_only_without_angles(chunk_engine: Engine) -> None:
    vectors, angles, both = ("embeddings",), ("rotary_cos",), ("embeddings", "rotary_cos")
    llama = chunk_engine.repository.get("llama")
    assert [fast_path_of(chunk_engine, llama, outputs, "float32") is None for outputs in (vectors, angles, both)] == [
        0,
        1,
        1,
    ]
    request = TokenRequest(input_ids=rows_of([100] * 90), outputs=angles, chunks="sent")
    found = embed(chunk_engine, "llama", request).arrays["rotary_cos"]
    assert found.shape == (90, 100, 8)
    np.testing.assert_allclose(found[3, :, 0].astype(np.float32), np.cos(np.arange(100)), atol=1e-6)


def test_multiple_outputs_are_chunked(chunk_engine: Engine) -> None:
    outputs = ("token_embeddings", "embeddings")
    sessions = chunk_engine.repository.get("gpt").sessions
    for lengths, offset in (([100] * 90, [7]), ([4100, 4100, 4100], [5, 0, 800]), ([3, 4000, 1, 4999], None)):
        rows = rows_of(lengths)
        given = None if offset is None else np.array(offset)
        request = TokenRequest(input_ids=rows, offset=given, outputs=outputs, chunks="sent")
        answer = embed(chunk_engine, "gpt", request)
        assert tuple(answer.tensors) == outputs
        lookup = sessions["token.onnx"].run({"input_ids": rows.values[None]})["token_embeddings"]
        for output, expected in zip(outputs, (lookup, whole(chunk_engine, "gpt", request)), strict=True):
            tensor = answer.tensors[output]
            assert isinstance(tensor, ChunkedTensor)
            parts = list(tensor)
            assert max(part.size for part in parts) <= INLINE_MAX_VALUES
            assert b"".join(part.tobytes() for part in parts) == expected.tobytes()


def test_embeddings_and_rotary_angles_are_returned_together(chunk_engine: Engine) -> None:
    request = TokenRequest(input_ids=rows_of([100] * 90), outputs=("embeddings", "rotary_cos"), chunks="sent")
    assert embed(chunk_engine, "llama", request).arrays.keys() == {"embeddings", "rotary_cos"}


@pytest.mark.parametrize("pooling", ["none", "mean", "first", "last"])
@pytest.mark.parametrize("masked", [False, True])
def test_chunked_padded_rows_equal_single_run(chunk_engine: Engine, pooling: str, masked: bool) -> None:
    """Oracle: each row alone, in one run of the graph with position counts."""
    rows = rows_of([4100, 4100, 4100])
    random = np.random.default_rng(5)
    rows.values[random.integers(0, 2, len(rows.values)) == 0] = PADDING
    rows.values[rows.starts] = 9
    mask = TokenRows((rows.values != PADDING).astype(np.int64), rows.lengths) if masked else None
    request = TokenRequest(input_ids=rows, offset=np.array([3]), attention_mask=mask, pooling=pooling, chunks="sent")
    tensor = embed(chunk_engine, "roberta", request).tensors["embeddings"]
    session = chunk_engine.repository.get("roberta").sessions["model.onnx"]
    found = []
    for start, length in zip(rows.starts, rows.lengths, strict=True):
        ids = rows.values[start : start + length].reshape(1, -1)
        feeds = {"input_ids": ids, "offset": np.array([3]), "token_type_ids": np.zeros_like(ids)}
        (vectors,) = session.run({tensor.name: feeds[tensor.name] for tensor in session.inputs})["embeddings"]
        real = vectors[ids[0] != PADDING]
        means = (np.add.reduce(real, axis=0, dtype=np.float64) / len(real)).astype(np.float32)
        found.append({"none": vectors, "mean": means, "first": real[0], "last": real[-1]}[pooling])
    expected = np.stack(found)
    if pooling != "none":
        assert isinstance(tensor, np.ndarray)
        assert tensor.tobytes() == expected.tobytes()
        return
    assert isinstance(tensor, ChunkedTensor)
    assert tensor.shape == expected.shape
    parts = list(tensor)
    assert max(part.size for part in parts) <= INLINE_MAX_VALUES
    assert b"".join(part.tobytes() for part in parts) == expected.tobytes()


def test_request_without_chunks_returns_an_array(chunk_engine: Engine) -> None:
    request = TokenRequest(input_ids=rows_of([100] * 90))
    np.testing.assert_array_equal(
        embed(chunk_engine, "gpt", request).arrays["embeddings"].reshape(-1, WIDTH), whole(chunk_engine, "gpt", request)
    )


@pytest.mark.parametrize("model", ["gpt", "bert", "roberta", "llama"])
@pytest.mark.parametrize("lengths", [[100] * 400, [3, 4999, 1, *[4500] * 7, 17]])
def test_buffered_response_equals_chunks_bit_for_bit(chunk_engine: Engine, model: str, lengths: list[int]) -> None:
    rows = rows_of(lengths)
    assert len(rows.values) * WIDTH > INLINE_MAX_VALUES
    found = embed(chunk_engine, model, TokenRequest(input_ids=rows, chunks="none")).tensors["embeddings"]
    pieces = embed(chunk_engine, model, TokenRequest(input_ids=rows, chunks="sent")).tensors["embeddings"]
    assert isinstance(found, np.ndarray)
    assert isinstance(pieces, ChunkedTensor)
    assert found.shape == pieces.shape
    assert found.tobytes() == b"".join(piece.tobytes() for piece in pieces)


def test_buffered_outputs_equal_chunks_bit_for_bit(chunk_engine: Engine) -> None:
    rows, outputs = rows_of([100] * 400), ("token_embeddings", "embeddings")
    found = embed(chunk_engine, "bert", TokenRequest(input_ids=rows, outputs=outputs)).arrays
    pieces = embed(chunk_engine, "bert", TokenRequest(input_ids=rows, outputs=outputs, chunks="sent")).tensors
    for output in outputs:
        assert found[output].tobytes() == b"".join(piece.tobytes() for piece in pieces[output])
