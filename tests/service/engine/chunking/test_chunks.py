"""Large answers: computed in pieces, with the bits of one run. Oracle: onnxruntime over the whole."""

import numpy as np
import pytest

from preblock.service.core.types import ChunkedTensor, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import fast_path_of
from preblock.service.runtime.session import INLINE_MAX_VALUES
from tests.service.engine.chunking.requests import CASES, PADDING, TYPES, WIDTH, embed, rows_of, whole


@pytest.mark.parametrize(("model", "dtype"), [("gpt", "float32"), ("bert", "float16"), ("llama", "bfloat16")])
def test_chunks_equal_single_run_bit_for_bit(chunk_engine: Engine, model: str, dtype: str) -> None:
    for case, (lengths, offset) in CASES.items():
        given = None if offset is None else np.array(offset)
        request = TokenRequest(input_ids=rows_of(lengths), offset=given, dtype=dtype, chunks="sent")
        pieces = embed(chunk_engine, model, request).tensors["embeddings"]
        equal = len(set(lengths)) == 1
        assert pieces.shape == ((len(lengths), lengths[0], WIDTH) if equal else (sum(lengths), WIDTH)), case
        assert content_of(pieces) == whole(chunk_engine, model, request).astype(TYPES[dtype]).tobytes(), case


def content_of(tensor: object) -> bytes:
    """Return the content of a tensor in chunks, after a check of their sizes."""
    assert isinstance(tensor, ChunkedTensor)
    parts = list(tensor)
    assert max(part.size for part in parts) <= INLINE_MAX_VALUES
    assert sum(part.nbytes for part in parts) == tensor.nbytes
    return b"".join(part.tobytes() for part in parts)


def test_rotary_family_has_fast_path_only_without_angles(chunk_engine: Engine) -> None:
    llama = chunk_engine.repository.get("llama")
    for outputs in (("embeddings",), ("rotary_cos",), ("embeddings", "rotary_cos")):
        assert (fast_path_of(chunk_engine, llama, outputs, "float32", "native") is None) == ("rotary_cos" in outputs)
    request = TokenRequest(input_ids=rows_of([100] * 90), outputs=("embeddings", "rotary_cos"), chunks="sent")
    found = embed(chunk_engine, "llama", request).arrays
    assert found.keys() == {"embeddings", "rotary_cos"}
    assert found["rotary_cos"].shape == (90, 100, 8)
    np.testing.assert_allclose(found["rotary_cos"][3, :, 0].astype(np.float32), np.cos(np.arange(100)), atol=1e-6)


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
            assert content_of(answer.tensors[output]) == expected.tobytes()


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
    assert tensor.shape == expected.shape
    assert content_of(tensor) == expected.tobytes()


@pytest.mark.parametrize("model", ["gpt", "bert", "roberta", "llama"])
def test_buffered_response_equals_chunks_bit_for_bit(chunk_engine: Engine, model: str) -> None:
    outputs = ("token_embeddings", "embeddings")
    for lengths in ([100] * 70, [3, 4999, 1, 4500, 17]):
        rows = rows_of(lengths)
        assert len(rows.values) * WIDTH > INLINE_MAX_VALUES
        found = embed(chunk_engine, model, TokenRequest(input_ids=rows, outputs=outputs)).tensors
        pieces = embed(chunk_engine, model, TokenRequest(input_ids=rows, outputs=outputs, chunks="sent")).tensors
        for output in outputs:
            buffered = found[output]
            assert isinstance(buffered, np.ndarray)
            assert buffered.shape == pieces[output].shape
            assert buffered.tobytes() == content_of(pieces[output])
