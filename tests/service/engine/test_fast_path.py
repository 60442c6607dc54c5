"""Requests of ids and an offset with failing runs: a failing session replaces the real one."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextvars import copy_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastPath, FastRun, fast_path_of
from preblock.service.engine.plain_calls import ZERO, Call
from preblock.service.engine.scheduler import MicroBatch, Scheduler
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext
from preblock.service.runtime.session import Session
from tests.support.engines import open_engine


class Failing(Session):
    """Refuses id 3, and runs of several requests."""

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> dict[str, Any]:
        if feeds["input_ids"].size > 1 or 3 in feeds["input_ids"]:
            raise MemoryError
        return super().run(feeds, outputs)


class BrokenScheduler(Scheduler):
    """Starts no micro-batch."""

    def batch(self, *_: Any, **__: Any) -> MicroBatch[Any, Any]:
        raise MemoryError


@pytest.fixture
def engine(tiny_repository: Path) -> Iterator[Engine]:
    with open_engine(tiny_repository) as engine:
        yield engine


@pytest.fixture
def failing(engine: Engine, tiny_repository: Path) -> FastPath:
    model = engine.repository.get("gpt")
    sessions = model.sessions | {"model.onnx": Failing(tiny_repository / "gpt/1")}
    found = fast_path_of(engine, dataclasses.replace(model, sessions=sessions), ("embeddings",), "float32", "native")
    assert found is not None
    return found


def begin(failing: FastPath, token: int) -> FastRun:
    run = failing.start(Call(np.array([[token]]), 1, 1, ZERO), perf_counter())
    assert run is not None
    return run


def outcomes(engine: Engine) -> dict[str, int]:
    found = engine.metrics.statistics()["gpt", 1].outcomes
    return {outcome: duration.count for outcome, duration in found.items()}


@pytest.mark.parametrize("tokens", [(1, 3, 2), (3,)])
def test_failed_run_is_answered_and_counted_one_by_one(
    engine: Engine, failing: FastPath, tiny_tables: dict[str, NDArray[np.float32]], tokens: tuple[int, ...]
) -> None:
    runs = [begin(failing, token) for token in tokens]
    for run, token in zip(runs, tokens, strict=True):
        if token == 3:
            with pytest.raises(MemoryError) as caught:
                run.result()
            run.end(caught.value)
            continue
        expected = tiny_tables["tokens"][token] + tiny_tables["positions"][0]
        assert [values.tobytes() for values in run.result()] == [expected.tobytes()]
        run.end()
    assert outcomes(engine) == ({"success": 2, "fail": 1} if len(tokens) > 1 else {"fail": 1})
    told = engine.metrics.expose()[0].decode()
    assert 'preblock_requests_total{model="gpt",outcome="internal_error",protocol="native"} 1.0' in told


def test_run_holds_memory_of_all_its_copies(engine: Engine) -> None:
    """A run that cannot start holds none."""
    copies, context, call = 2**16, RequestContext(), Call(np.array([[1]]), 1, 1, ZERO)
    path = fast_path_of(engine, engine.repository.get("gpt"), ("embeddings",), "float32", "grpc", copies=copies)
    assert path is not None
    of_request = copy_context()
    of_request.run(CURRENT_REQUEST.set, context)
    run = of_request.run(path.start, call, perf_counter())
    assert run is not None
    run.end()
    assert context.held == 4 * path.width * copies
    context.release()
    engine.scheduler.close()
    engine.scheduler = BrokenScheduler(1, engine.settings)
    with pytest.raises(MemoryError):
        of_request.run(path.start, call, perf_counter())
    assert context.held == 0
