"""Content in parts. Oracles: Python's base64, and orjson over the whole array."""

import base64
import itertools

import numpy as np
import orjson
import pytest

from preblock.service.codecs.chunks import (
    CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    MAX_JOINED,
    MAX_JSON_VALUES,
    MIN_WRITE_BYTES,
    Base64Chunks,
    JsonFloats,
    body_chunks,
    join,
    raw_bytes,
)
from preblock.service.core.types import DTYPES, ChunkedTensor

RANDOM = np.random.default_rng(0).bytes(5 * CHUNK_BYTES + 7)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, CHUNK_BYTES, CHUNK_BYTES + 1, len(RANDOM)])
def test_base64_of_parts_equals_base64_of_whole(size: int) -> None:
    whole = RANDOM[:size]
    for cuts in ((), (1,), (0, 1, 2, 3, 4), (CHUNK_BYTES - 1, CHUNK_BYTES + 1, 2 * CHUNK_BYTES)):
        edges = [0, *(min(cut, size) for cut in cuts), size]
        parts = Base64Chunks(tuple(memoryview(whole)[start:end] for start, end in itertools.pairwise(edges)))
        assert join([b"<", parts, b">"]) == b"<" + base64.b64encode(whole) + b">"
        assert len(parts) == len(base64.b64encode(whole))


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("size", [1, 500, CHUNK_BYTES, MAX_CHUNK_BYTES, len(RANDOM)])
def test_writes_are_coalesced_into_large_chunks(size: int, encoded: bool) -> None:
    rows = [RANDOM[start : start + size] for start in range(0, min(len(RANDOM), 2000 * size), size)]
    parts = [part for row in rows for part in (b"[", Base64Chunks((row,)) if encoded else row, b"]")]
    sent = list(body_chunks(parts))
    assert b"".join(sent) == join(parts)
    assert max(map(len, sent)) <= MAX_CHUNK_BYTES
    together = (len(one) + len(other) > MIN_WRITE_BYTES for one, other in itertools.pairwise(sent))
    assert all(together) or len(sent) <= 2 * len(parts) // MAX_JOINED  # base64 comes in two parts


def test_large_values_are_sent_without_a_copy() -> None:
    for size in (MIN_WRITE_BYTES + 1, CHUNK_BYTES, len(RANDOM)):
        values = np.frombuffer(RANDOM[:size], np.uint8)
        header, *sent = body_chunks([b"header", raw_bytes(values)])
        assert header == b"header"
        large = [np.frombuffer(packet, np.uint8) for packet in sent if len(packet) > MIN_WRITE_BYTES]
        assert all(np.shares_memory(packet, values) for packet in large)
        assert len(large) == max(1, size // CHUNK_BYTES)


def test_base64_is_computed_lazily() -> None:
    taken = body_chunks([Base64Chunks((RANDOM,)), Base64Chunks(("no bytes",))])  # type: ignore[arg-type]
    assert next(taken) == base64.b64encode(RANDOM[:CHUNK_BYTES])


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1, 1, 3), ()),
    ((3, 5, 4), (1, 5, 6, 10, 11)),
    ((2, 3, MAX_JSON_VALUES), (4,)),
    ((2, 2, MAX_JSON_VALUES + 1), (1,)),
    ((2, MAX_JSON_VALUES, 1), (MAX_JSON_VALUES - 1,)),
    ((7, 4), (2, 3)),
    ((2 * MAX_JSON_VALUES,), (9,)),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_json_floats_of_parts_equal_json_of_whole(dtype: str) -> None:
    for shape, cuts in SHAPES:
        values = np.random.default_rng(0).standard_normal(shape).astype(DTYPES[dtype])
        vectors = values.reshape(-1, shape[-1] if len(shape) > 1 else 4)  # a piece holds whole vectors
        numbers = JsonFloats(ChunkedTensor(shape, dtype, iter(np.split(vectors, list(cuts)))), shape)
        whole = orjson.dumps(values.astype(np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
        assert join([b"<", numbers, b">"]) == b"<" + whole + b">"
