"""Large answers: computed in pieces, with the bits of one run. Oracle: onnxruntime over the whole, pooled by NumPy."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid
from preblock.service.core.results import ChunkedTensor, EmbedResult
from preblock.service.core.types import TokenRequest, TokenRows
from preblock.service.engine.chunking import MAX_BUFFERED_TEXT_VALUES
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import fast_path_of
from preblock.service.engine.scheduler import Scheduler
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.session import INLINE_MAX_VALUES, Session
from tests.support.artifacts import copy_artifact
from tests.support.engines import ask_engine, open_engine

T = TypeVar("T")
VOCABULARY, WIDTH, MAX_LEN = 300, 64, 5000
PADDING = 1
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("pieces")
    for name in ("gpt", "bert", "roberta"):
        copy_artifact(f"{name}-300x64x5000", root, name)
    copy_artifact("llama-300x64", root, "llama")
    copy_artifact("gpt-300x64x5000-huge-value", root, "large")
    with open_engine(root) as engine:
        yield engine


def rows_of(lengths: list[int]) -> TokenRows:
    random = np.random.default_rng(len(lengths))
    return TokenRows(random.integers(8, VOCABULARY, sum(lengths)), np.array(lengths))


def embed(engine: Engine, model: str, request: TokenRequest) -> EmbedResult:
    return asyncio.run(ask_engine(engine, engine.repository.get(model), request))


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["gpt", "bert", "llama"])
@pytest.mark.parametrize("dtype", TYPES)
def test_chunks_equal_single_run_bit_for_bit(engine: Engine, case: str, model: str, dtype: str) -> None:
    lengths, offset = CASES[case]
    request = TokenRequest(
        input_ids=rows_of(lengths), offset=None if offset is None else np.array(offset), dtype=dtype, in_pieces=True
    )
    answer = embed(engine, model, request)
    pieces = answer.tensors["embeddings"]
    assert isinstance(pieces, ChunkedTensor)
    equal = len(set(lengths)) == 1
    assert pieces.shape == ((len(lengths), lengths[0], WIDTH) if equal else (sum(lengths), WIDTH))
    parts = list(pieces)
    assert max(part.size for part in parts) <= INLINE_MAX_VALUES
    assert sum(part.nbytes for part in parts) == pieces.nbytes
    expected = whole(engine, model, request).astype(TYPES[dtype])
    assert b"".join(part.tobytes() for part in parts) == expected.tobytes()


def test_rotary_family_has_fast_path_only_without_angles(engine: Engine) -> None:
    vectors, angles, both = ("embeddings",), ("rotary_cos",), ("embeddings", "rotary_cos")
    llama = engine.repository.get("llama")
    assert [fast_path_of(engine, llama, outputs, "float32") is None for outputs in (vectors, angles, both)] == [0, 1, 1]
    request = TokenRequest(input_ids=rows_of([100] * 90), outputs=angles, in_pieces=True)
    found = embed(engine, "llama", request).arrays["rotary_cos"]
    assert found.shape == (90, 100, 8)
    np.testing.assert_allclose(found[3, :, 0].astype(np.float32), np.cos(np.arange(100)), atol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling_in_chunks_equals_pooled_rows(engine: Engine, case: str, pooling: str) -> None:
    lengths, offset = CASES[case]
    request = TokenRequest(
        input_ids=rows_of(lengths), offset=None if offset is None else np.array(offset), pooling=pooling
    )
    answer = embed(engine, "gpt", request)
    ends = np.cumsum(lengths)[:-1]
    rows = np.split(whole(engine, "gpt", request), ends)
    expected = {
        "mean": lambda row: (np.add.reduce(row, axis=0, dtype=np.float64) / len(row)).astype(np.float32),
        "first": lambda row: row[0],
        "last": lambda row: row[-1],
    }[pooling]
    np.testing.assert_array_equal(answer.arrays["embeddings"], np.stack(list(map(expected, rows))))


def test_pooling_applies_mask_of_each_row(engine: Engine) -> None:
    lengths = [100] * 90
    ids = rows_of(lengths)
    mask = np.random.default_rng(1).integers(0, 2, 9000)
    mask[::100] = 1
    many = TokenRequest(input_ids=ids, attention_mask=TokenRows(mask, ids.lengths), pooling="mean")
    found = embed(engine, "gpt", many).arrays["embeddings"]
    for row in (0, 41, 89):
        part = slice(100 * row, 100 * row + 100)
        one = TokenRows(ids.values[part], np.array([100]))
        alone = TokenRequest(input_ids=one, attention_mask=TokenRows(mask[part], one.lengths), pooling="mean")
        np.testing.assert_array_equal(embed(engine, "gpt", alone).arrays["embeddings"][0], found[row])


def test_too_narrow_dtype_is_rejected_before_response(engine: Engine) -> None:
    ids = rows_of([100] * 90)
    ids.values[8999] = 7
    with pytest.raises(Invalid, match="dtype: got float16"):
        embed(engine, "large", TokenRequest(input_ids=ids, dtype="float16", in_pieces=True))
    assert isinstance(
        embed(engine, "large", TokenRequest(input_ids=ids, dtype="bfloat16", in_pieces=True)).tensors["embeddings"],
        ChunkedTensor,
    )


def test_unfit_values_are_rejected_before_response(engine: Engine) -> None:
    def check(vectors: NDArray[np.generic]) -> None:
        if np.abs(vectors).max() > 1e5:
            raise Invalid("encoding", "float", "base64")

    ids = rows_of([100] * 330)
    request = TokenRequest(input_ids=ids, in_pieces=True, check=check)
    assert isinstance(embed(engine, "large", request).tensors["embeddings"], ChunkedTensor)
    ids.values[32999] = 7
    with pytest.raises(Invalid, match="encoding: got float"):
        embed(engine, "large", request)


def counted(engine: Engine) -> tuple[dict[str, int], dict[str, float]]:
    """Requests to `gpt` by outcome, and the seconds of its phases."""
    found = engine.metrics.statistics()["gpt", 1]
    phases: dict[str, float] = {}
    for (_, phase), duration in found.stages.items():
        phases[phase] = phases.get(phase, 0) + duration.seconds
    return {outcome: duration.count for outcome, duration in found.outcomes.items()}, phases


@pytest.mark.parametrize("taken", [0, 1])
def test_disconnect_before_or_after_chunk_counts_as_failure(engine: Engine, taken: int) -> None:
    before, _ = counted(engine)
    pieces = embed(engine, "gpt", TokenRequest(input_ids=rows_of([100] * 90), in_pieces=True)).tensors["embeddings"]
    assert isinstance(pieces, ChunkedTensor)
    for _ in range(taken):
        assert next(iter(pieces)).size
    del pieces
    after, _ = counted(engine)
    assert after.get("fail", 0) == before.get("fail", 0) + 1
    assert after.get("success", 0) == before.get("success", 0)


def test_check_before_response_is_not_queue_time(engine: Engine) -> None:
    _, before = counted(engine)
    request = TokenRequest(input_ids=rows_of([100] * 330), in_pieces=True, check=lambda _: time.sleep(0.1))
    list(embed(engine, "gpt", request).tensors["embeddings"])
    _, after = counted(engine)
    passed = {phase: after[phase] - before.get(phase, 0) for phase in after}
    assert passed["queue"] < 0.1 <= passed["compute_infer"]


class RecordingScheduler(Scheduler):
    """Tells how much of its work was for a thread."""

    in_threads = 0

    async def run(self, size: int, work: Callable[[], T], text: bool = False) -> T:
        self.in_threads += size > INLINE_MAX_VALUES
        return await super().run(size, work, text)


@pytest.mark.parametrize(("rows", "in_threads"), [(30, 0), (40, 2)])
def test_only_large_requests_are_processed_in_threads(engine: Engine, rows: int, in_threads: int) -> None:
    scheduler = RecordingScheduler(1, engine.settings)
    try:
        other = Engine(engine.repository, scheduler, Metrics(), engine.settings)
        embed(other, "roberta", TokenRequest(input_ids=rows_of([400] * rows), in_pieces=True))
        assert scheduler.in_threads == in_threads
    finally:
        scheduler.close()


def test_multiple_outputs_are_chunked(engine: Engine) -> None:
    outputs = ("token_embeddings", "embeddings")
    sessions = engine.repository.get("gpt").sessions
    for lengths, offset in (([100] * 90, [7]), ([4100, 4100, 4100], [5, 0, 800]), ([3, 4000, 1, 4999], None)):
        rows = rows_of(lengths)
        given = None if offset is None else np.array(offset)
        request = TokenRequest(input_ids=rows, offset=given, outputs=outputs, in_pieces=True)
        answer = embed(engine, "gpt", request)
        assert tuple(answer.tensors) == outputs
        lookup = sessions["token.onnx"].run({"input_ids": rows.values[None]})["token_embeddings"]
        for output, expected in zip(outputs, (lookup, whole(engine, "gpt", request)), strict=True):
            tensor = answer.tensors[output]
            assert isinstance(tensor, ChunkedTensor)
            parts = list(tensor)
            assert max(part.size for part in parts) <= INLINE_MAX_VALUES
            assert b"".join(part.tobytes() for part in parts) == expected.tobytes()


def test_embeddings_and_rotary_angles_are_returned_together(engine: Engine) -> None:
    request = TokenRequest(input_ids=rows_of([100] * 90), outputs=("embeddings", "rotary_cos"), in_pieces=True)
    assert embed(engine, "llama", request).arrays.keys() == {"embeddings", "rotary_cos"}


@pytest.mark.parametrize("left", [0, 1])
def test_multiple_outputs_are_counted_once(engine: Engine, left: int) -> None:
    def counts() -> dict[str, int]:
        outcomes = engine.metrics.statistics()["gpt", 1].outcomes
        return {outcome: duration.count for outcome, duration in outcomes.items()}

    request = TokenRequest(input_ids=rows_of([100] * 90), outputs=("embeddings", "token_embeddings"), in_pieces=True)
    embed(engine, "gpt", TokenRequest(input_ids=rows_of([1])))
    before = counts()
    tensors = [*embed(engine, "gpt", request).tensors.values()]
    while len(tensors) > left:
        assert counts() == before
        tensor = tensors.pop()
        assert isinstance(tensor, ChunkedTensor)
        for _ in tensor:
            pass
        del tensor
    tensors.clear()
    after = counts()
    outcome = "fail" if left else "success"
    assert after == before | {outcome: before.get(outcome, 0) + 1}


@pytest.mark.parametrize("pooling", ["none", "mean", "first", "last"])
@pytest.mark.parametrize("masked", [False, True])
def test_chunked_padded_rows_equal_single_run(engine: Engine, pooling: str, masked: bool) -> None:
    """Oracle: each row alone, in one run of the graph with position counts."""
    rows = rows_of([4100, 4100, 4100])
    random = np.random.default_rng(5)
    rows.values[random.integers(0, 2, len(rows.values)) == 0] = PADDING
    rows.values[rows.starts] = 9
    mask = TokenRows((rows.values != PADDING).astype(np.int64), rows.lengths) if masked else None
    request = TokenRequest(input_ids=rows, offset=np.array([3]), attention_mask=mask, pooling=pooling, in_pieces=True)
    tensor = embed(engine, "roberta", request).tensors["embeddings"]
    session = engine.repository.get("roberta").sessions["model.onnx"]
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


class Watched(Session):
    """Notes the largest number of values of a run."""

    most = 0

    def run(self, feeds: Mapping[str, NDArray[Any]], *outputs: Any) -> dict[str, NDArray[np.float32]]:
        found = super().run(feeds, *outputs)
        Watched.most = max(Watched.most, *(values.size for values in found.values()))
        return found


def test_pooling_of_long_row_uses_bounded_chunks(engine: Engine) -> None:
    model = engine.repository.get("llama")
    folder = engine.repository.root / "llama/1"
    watched = dataclasses.replace(model, sessions={graph: Watched(folder, graph=graph) for graph in model.sessions})
    request = TokenRequest(input_ids=rows_of([300, 1, 20000]), pooling="mean")
    found = asyncio.run(ask_engine(engine, watched, request)).arrays["embeddings"]
    assert 0 < Watched.most <= INLINE_MAX_VALUES
    session = model.sessions["model.onnx"]
    rows = np.split(request.input_ids.values, [300, 301])
    runs = [session.run({"input_ids": row[None], "offset": np.array([0])})["embeddings"][0] for row in rows]
    expected = [(np.add.reduce(run, axis=0, dtype=np.float64) / len(run)).astype(np.float32) for run in runs]
    assert found.tobytes() == np.stack(expected).tobytes()


def test_request_without_chunks_returns_an_array(engine: Engine) -> None:
    request = TokenRequest(input_ids=rows_of([100] * 90))
    np.testing.assert_array_equal(
        embed(engine, "gpt", request).arrays["embeddings"].reshape(-1, WIDTH), whole(engine, "gpt", request)
    )


@pytest.mark.parametrize("model", ["gpt", "bert", "roberta", "llama"])
@pytest.mark.parametrize("lengths", [[100] * 400, [3, 4999, 1, *[4500] * 7, 17]])
def test_buffered_response_equals_chunks_bit_for_bit(engine: Engine, model: str, lengths: list[int]) -> None:
    rows = rows_of(lengths)
    assert len(rows.values) * WIDTH > MAX_BUFFERED_TEXT_VALUES
    found = embed(engine, model, TokenRequest(input_ids=rows, in_pieces=False)).tensors["embeddings"]
    pieces = embed(engine, model, TokenRequest(input_ids=rows, in_pieces=True)).tensors["embeddings"]
    assert isinstance(found, np.ndarray)
    assert isinstance(pieces, ChunkedTensor)
    assert found.shape == pieces.shape
    assert found.tobytes() == b"".join(piece.tobytes() for piece in pieces)


def test_buffered_outputs_equal_chunks_bit_for_bit(engine: Engine) -> None:
    rows, outputs = rows_of([100] * 400), ("token_embeddings", "embeddings")
    found = embed(engine, "bert", TokenRequest(input_ids=rows, outputs=outputs)).arrays
    pieces = embed(engine, "bert", TokenRequest(input_ids=rows, outputs=outputs, in_pieces=True)).tensors
    for output in outputs:
        assert found[output].tobytes() == b"".join(piece.tobytes() for piece in pieces[output])
