"""Metrics, threads, memory and early refusals of large answers."""

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid
from preblock.service.core.types import ChunkedTensor, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.scheduler import Scheduler
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.session import INLINE_MAX_VALUES
from tests.service.engine.chunking.requests import T, embed, rows_of


def test_unfit_values_are_rejected_before_response(chunk_engine: Engine) -> None:
    def check(vectors: NDArray[np.generic]) -> None:
        if np.abs(vectors).max() > 1e5:
            raise Invalid("encoding", "float", "base64")

    ids = rows_of([100] * 330)
    request = TokenRequest(input_ids=ids, chunks="sent", check=check)
    assert isinstance(embed(chunk_engine, "large", request).tensors["embeddings"], ChunkedTensor)
    ids.values[32999] = 7
    with pytest.raises(Invalid, match="encoding: got float"):
        embed(chunk_engine, "large", request)
    for dtype, fits in (("float16", False), ("bfloat16", True)):
        with nullcontext() if fits else pytest.raises(Invalid, match=f"dtype: got {dtype}"):
            embed(chunk_engine, "large", TokenRequest(input_ids=ids, dtype=dtype, chunks="sent"))


def counted(engine: Engine) -> tuple[dict[str, int], dict[str, float]]:
    """Requests to `gpt` by outcome, and the seconds of its phases."""
    found = engine.metrics.statistics()["gpt", 1]
    phases: dict[str, float] = {}
    for (_, phase), duration in found.stages.items():
        phases[phase] = phases.get(phase, 0) + duration.seconds
    return {outcome: duration.count for outcome, duration in found.outcomes.items()}, phases


@pytest.mark.parametrize("taken", [0, 1])
def test_disconnect_before_or_after_chunk_counts_as_failure(chunk_engine: Engine, taken: int) -> None:
    request = TokenRequest(input_ids=rows_of([100] * 90), chunks="sent")
    embed(chunk_engine, "gpt", TokenRequest(input_ids=rows_of([1])))
    before, _ = counted(chunk_engine)
    pieces = embed(chunk_engine, "gpt", request).tensors["embeddings"]
    for _ in range(taken):
        assert next(iter(pieces)).size
    del pieces
    assert counted(chunk_engine)[0] == before | {"fail": before.get("fail", 0) + 1}


def test_disconnect_frees_request_without_collection(chunk_engine: Engine) -> None:
    ids = rows_of([100] * 90)
    alive = weakref.ref(ids.values)
    answer = embed(chunk_engine, "gpt", TokenRequest(input_ids=ids, chunks="sent"))
    del ids
    assert alive() is not None
    gc.disable()
    try:
        del answer
        assert alive() is None
    finally:
        gc.enable()


def test_check_before_response_is_not_queue_time(chunk_engine: Engine) -> None:
    embed(chunk_engine, "gpt", TokenRequest(input_ids=rows_of([1])))
    _, before = counted(chunk_engine)
    request = TokenRequest(input_ids=rows_of([100] * 330), chunks="sent", check=lambda _: time.sleep(0.1))
    list(embed(chunk_engine, "gpt", request).tensors["embeddings"])
    _, after = counted(chunk_engine)
    passed = {phase: after[phase] - before.get(phase, 0) for phase in after}
    assert passed["queue"] < 0.1 <= passed["compute_infer"]


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
        embed(other, "roberta", TokenRequest(input_ids=rows_of([400] * rows), chunks="sent"))
        assert scheduler.in_threads == in_threads
    finally:
        scheduler.close()


@pytest.mark.parametrize("left", [0, 1])
def test_multiple_outputs_are_counted_once(chunk_engine: Engine, left: int) -> None:
    request = TokenRequest(input_ids=rows_of([100] * 90), outputs=("embeddings", "token_embeddings"), chunks="sent")
    embed(chunk_engine, "gpt", TokenRequest(input_ids=rows_of([1])))
    before, _ = counted(chunk_engine)
    tensors = [*embed(chunk_engine, "gpt", request).tensors.values()]
    while len(tensors) > left:
        assert counted(chunk_engine)[0] == before
        tensor = tensors.pop()
        assert isinstance(tensor, ChunkedTensor)
        for _ in tensor:
            pass
        del tensor
    tensors.clear()
    outcome = "fail" if left else "success"
    assert counted(chunk_engine)[0] == before | {outcome: before.get(outcome, 0) + 1}
