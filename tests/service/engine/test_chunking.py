"""Large answers: computed and pooled in chunks, with the bits of one run, and counted once.

Oracle: onnxruntime over the whole.
"""

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid
from preblock.service.core.types import ChunkedTensor, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.scheduler import Scheduler
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.session import INLINE_MAX_VALUES, Session
from tests.support.artifacts import copy_artifact
from tests.support.engines import answer_of, ask_engine, open_engine

T = TypeVar("T")
VOCABULARY, WIDTH, MAX_LEN = 300, 64, 5000
PADDING = 1
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def rows_of(lengths: list[int]) -> TokenRows:
    random = np.random.default_rng(len(lengths))
    return TokenRows(random.integers(8, VOCABULARY, sum(lengths)), np.array(lengths))


def whole(engine: Engine, model: str, request: TokenRequest) -> NDArray[np.float32]:
    """The vectors of the tokens one after another, of one run for each row."""
    rows, session = request.input_ids, engine.repository.get(model).sessions["model.onnx"]
    found = []
    offsets = np.broadcast_to([0] if request.offset is None else request.offset, len(rows.lengths))
    for start, length, offset in zip(rows.starts, rows.lengths, offsets, strict=True):
        ids = rows.values[start : start + length].reshape(1, -1)
        feeds = {"input_ids": ids, "offset": np.array([offset]), "token_type_ids": np.zeros_like(ids)}
        found.append(session.run({tensor.name: feeds[tensor.name] for tensor in session.inputs})["embeddings"][0])
    return np.concatenate(found)


CASES = {
    "equal rows": ([100] * 90, None),
    "long rows": ([4100, 4100, 4100], None),
    "rows of one token": ([1] * 9000, None),
    "ragged": ([3, 4000, 1, 4999, 17, 1000], None),
    "offsets": ([4100, 4100, 4100], [5, 0, 800]),
    "one offset": ([100] * 90, [77]),
}


@pytest.fixture(scope="module")
def chunk_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("pieces")
    for name in ("gpt", "bert", "roberta"):
        copy_artifact(f"{name}-300x64x5000", root, name)
    copy_artifact("llama-300x64", root, "llama")
    copy_artifact("gpt-300x64x5000-huge-value", root, "large")
    with open_engine(root) as engine:
        yield engine


@pytest.mark.parametrize(("model", "dtype"), [("gpt", "float32"), ("bert", "float16"), ("llama", "bfloat16")])
def test_large_answers_equal_single_run_bit_for_bit(chunk_engine: Engine, model: str, dtype: str) -> None:
    """Answers in chunks, and whole ones, which are computed in chunks too."""
    for case, (lengths, offset) in CASES.items():
        given = None if offset is None else np.array(offset)
        request = TokenRequest(input_ids=rows_of(lengths), offset=given, dtype=dtype)
        expected = whole(chunk_engine, model, request).astype(TYPES[dtype]).tobytes()
        equal = len(set(lengths)) == 1
        for chunks in ("sent", "none"):
            found = answer_of(chunk_engine, model, dataclasses.replace(request, chunks=chunks)).tensors["embeddings"]
            assert found.shape == ((len(lengths), lengths[0], WIDTH) if equal else (sum(lengths), WIDTH)), case
            content = content_of(found) if isinstance(found, ChunkedTensor) else found.tobytes()
            assert (isinstance(found, ChunkedTensor), content) == (chunks == "sent", expected), case


def mean(row: NDArray[np.float32]) -> NDArray[np.float32]:
    total: NDArray[np.float64] = np.add.reduce(row, axis=0, dtype=np.float64)
    return (total / len(row)).astype(np.float32)


POOLED: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "mean": mean,
    "first": lambda row: row[0],
    "last": lambda row: row[-1],
}


def content_of(tensor: object) -> bytes:
    """Return the content of a tensor in chunks, after a check that these are small and few."""
    assert isinstance(tensor, ChunkedTensor)
    parts = list(tensor)
    assert max(part.size for part in parts) <= INLINE_MAX_VALUES
    assert len(parts) <= 2 + 2 * tensor.nbytes // (INLINE_MAX_VALUES * parts[0].itemsize)
    assert sum(part.nbytes for part in parts) == tensor.nbytes
    return b"".join(part.tobytes() for part in parts)


def test_rotary_angles_are_sent_in_chunks(chunk_engine: Engine) -> None:
    request = TokenRequest(input_ids=rows_of([100] * 90), outputs=("embeddings", "rotary_cos"), chunks="sent")
    found = answer_of(chunk_engine, "llama", request).arrays
    assert found.keys() == {"embeddings", "rotary_cos"}
    assert found["rotary_cos"].shape == (90, 100, 8)
    np.testing.assert_allclose(found["rotary_cos"][3, :, 0].astype(np.float32), np.cos(np.arange(100)), atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_chunked_padded_rows_equal_single_run(chunk_engine: Engine, masked: bool) -> None:
    """Oracle: each row alone, in one run of the graph with position counts."""
    rows = rows_of([4100, 4100, 4100])
    random = np.random.default_rng(5)
    rows.values[random.integers(0, 2, len(rows.values)) == 0] = PADDING
    rows.values[rows.starts] = 9
    mask = TokenRows((rows.values != PADDING).astype(np.int64), rows.lengths) if masked else None
    request = TokenRequest(input_ids=rows, offset=np.array([3] * 3), attention_mask=mask)
    vectors = np.split(whole(chunk_engine, "roberta", request), 3)
    real = [row[ids != PADDING] for row, ids in zip(vectors, np.split(rows.values, 3), strict=True)]
    for pooling, pool in POOLED.items():
        found = answer_of(chunk_engine, "roberta", dataclasses.replace(request, pooling=pooling)).arrays["embeddings"]
        assert found.tobytes() == np.stack([pool(row) for row in real]).tobytes(), pooling
    tensor = answer_of(chunk_engine, "roberta", dataclasses.replace(request, chunks="sent")).tensors["embeddings"]
    assert content_of(tensor) == np.stack(vectors).tobytes()


@pytest.mark.parametrize("case", CASES)
def test_pooling_in_chunks_equals_pooled_rows(chunk_engine: Engine, case: str) -> None:
    lengths, offset = CASES[case]
    given = None if offset is None else np.array(offset)
    request = TokenRequest(input_ids=rows_of(lengths), offset=given)
    rows = np.split(whole(chunk_engine, "gpt", request), np.cumsum(lengths)[:-1])
    for pooling, pool in POOLED.items():
        found = answer_of(chunk_engine, "gpt", dataclasses.replace(request, pooling=pooling)).arrays["embeddings"]
        np.testing.assert_array_equal(found, np.stack([pool(row) for row in rows]), pooling)


class Watched(Session):
    """Notes the largest number of values of a run."""

    most = 0

    def run(self, feeds: Mapping[str, NDArray[Any]], *outputs: Any) -> dict[str, NDArray[np.float32]]:
        found = super().run(feeds, *outputs)
        Watched.most = max(Watched.most, *(values.size for values in found.values()))
        return found


def test_pooling_of_long_row_uses_bounded_chunks(chunk_engine: Engine) -> None:
    model = chunk_engine.repository.get("llama")
    folder = chunk_engine.repository.root / "llama/1"
    sessions: dict[str, Session] = {graph: Watched(folder, graph=graph) for graph in model.sessions}
    watched = dataclasses.replace(model, sessions=sessions, lookup_table=None)
    request = TokenRequest(input_ids=rows_of([300, 1, 20000]), pooling="mean")
    found = asyncio.run(ask_engine(chunk_engine, watched, request)).arrays["embeddings"]
    assert 0 < Watched.most <= INLINE_MAX_VALUES
    session = model.sessions["model.onnx"]
    rows = np.split(request.input_ids.values, [300, 301])
    runs = [session.run({"input_ids": row[None], "offset": np.array([0])})["embeddings"][0] for row in rows]
    assert found.tobytes() == np.stack([mean(run) for run in runs]).tobytes()
    assert answer_of(chunk_engine, "llama", request).arrays["embeddings"].tobytes() == found.tobytes()  # from the table


def test_unfit_values_are_rejected_before_response(chunk_engine: Engine) -> None:
    def check(vectors: NDArray[np.generic]) -> None:
        if np.abs(vectors).max() > 1e5:
            raise Invalid("encoding", "float", "base64")

    ids = rows_of([100] * 330)
    request = TokenRequest(input_ids=ids, chunks="sent", check=check)
    assert isinstance(answer_of(chunk_engine, "large", request).tensors["embeddings"], ChunkedTensor)
    ids.values[32999] = 7
    with pytest.raises(Invalid, match="encoding: got float"):
        answer_of(chunk_engine, "large", request)
    for dtype, fits in (("float16", False), ("bfloat16", True)):
        with nullcontext() if fits else pytest.raises(Invalid, match=f"dtype: got {dtype}"):
            answer_of(chunk_engine, "large", TokenRequest(input_ids=ids, dtype=dtype, chunks="sent"))


def counted(engine: Engine) -> dict[str, int]:
    """Return the number of requests to `gpt` by outcome."""
    return {outcome: duration.count for outcome, duration in engine.metrics.statistics()["gpt", 1].outcomes.items()}


def test_disconnect_frees_request_without_collection(chunk_engine: Engine) -> None:
    ids = rows_of([100] * 90)
    alive = weakref.ref(ids.values)
    answer = answer_of(chunk_engine, "gpt", TokenRequest(input_ids=ids, chunks="sent"))
    del ids
    assert alive() is not None
    gc.disable()
    try:
        del answer
        assert alive() is None
    finally:
        gc.enable()


class RecordingScheduler(Scheduler):
    """Tells how much of its work was for a thread."""

    in_threads = 0

    async def run(self, size: int, work: Callable[[], T], text: bool = False) -> T:
        self.in_threads += size > INLINE_MAX_VALUES
        return await super().run(size, work, text)


@pytest.mark.parametrize(("rows", "in_threads"), [(30, 0), (40, 2)])
def test_only_large_requests_are_processed_in_threads(chunk_engine: Engine, rows: int, in_threads: int) -> None:
    scheduler = RecordingScheduler(1, chunk_engine.settings)
    try:
        other = Engine(chunk_engine.repository, scheduler, Metrics(), chunk_engine.settings)
        answer_of(other, "roberta", TokenRequest(input_ids=rows_of([400] * rows), chunks="sent"))
        assert scheduler.in_threads == in_threads
    finally:
        scheduler.close()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_multiple_outputs_are_counted_once(chunk_engine: Engine, left: int) -> None:
    request = TokenRequest(input_ids=rows_of([100] * 90), outputs=("embeddings", "token_embeddings"), chunks="sent")
    answer_of(chunk_engine, "gpt", TokenRequest(input_ids=rows_of([1])))
    before = counted(chunk_engine)
    tensors = [*answer_of(chunk_engine, "gpt", request).tensors.values()]
    while len(tensors) > left:
        assert counted(chunk_engine) == before
        tensor = tensors.pop()
        assert isinstance(tensor, ChunkedTensor)
        for _ in tensor:
            pass
        del tensor
    tensors.clear()
    outcome = "fail" if left else "success"
    assert counted(chunk_engine) == before | {outcome: before.get(outcome, 0) + 1}
