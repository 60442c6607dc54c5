"""A decode stream without its door. Oracle: one request to the engine."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from incipit.service.batching import Scheduler
from incipit.service.decode import DecodeStream
from incipit.service.engine import Engine
from incipit.service.errors import ClientFault, Invalid, TooLarge, Unavailable
from incipit.service.messages import Rows
from incipit.service.metrics import Metrics
from incipit.service.repository import Repository
from incipit.service.runtime import CPU
from incipit.service.wire.native import read_embed


@pytest.fixture(scope="module")
def engine(tiny_repository: Path) -> Iterator[Engine]:
    scheduler = Scheduler(1, 8)
    yield Engine(Repository(tiny_repository, CPU, 1), scheduler, Metrics(), 6)
    scheduler.close()


def row(*ids: int) -> Rows:
    return Rows(np.array(ids, np.int64), np.array([len(ids)]))


def stream_of(engine: Engine, name: str = "bert", **options: Any) -> DecodeStream:
    return DecodeStream(engine, engine.repository.get(name), **options)


def test_steps_equal_one_request_bit_for_bit(engine: Engine) -> None:
    stream = stream_of(engine, offset=2)
    steps = [row(1), row(2, 3, 4), row(5, 6)]
    parts = [asyncio.run(stream.step(step)).tensors["embeddings"] for step in steps]
    request = read_embed({"input_ids": [1, 2, 3, 4, 5, 6], "offset": 2}).request
    whole = asyncio.run(engine.embed(stream.model, request))
    assert np.concatenate(parts, 1).tobytes() == whole.tensors["embeddings"].tobytes()
    assert stream.offset == 8


@pytest.mark.parametrize(
    ("step", "segments", "kind"),
    [
        (row(11), None, Invalid),
        (row(-1), None, Invalid),
        (row(), None, Invalid),
        (row(1), row(2), Invalid),
        (row(1), row(0, 0), Invalid),
        (Rows(np.array([1, 2]), np.array([1, 1])), None, Invalid),
        (Rows(np.zeros(0, np.int64), np.zeros(0, np.int64)), None, Invalid),
        (row(1, 1, 1, 1, 1, 1), None, Invalid),
        (row(1, 1, 1, 1, 1, 1, 1), None, TooLarge),
    ],
)
def test_a_step_that_is_not_allowed_changes_nothing(
    engine: Engine, step: Rows, segments: Rows | None, kind: type[ClientFault]
) -> None:
    stream = stream_of(engine, offset=3)
    with pytest.raises(kind):
        asyncio.run(stream.step(step, segments))
    assert stream.offset == 3
    assert asyncio.run(stream.step(row(1, 2, 3, 4, 5))).next_offset.tolist() == [8]


@pytest.mark.parametrize("offset", [-1, 9, 2**63 - 1])
def test_an_offset_that_no_stream_can_have_is_refused(engine: Engine, offset: int) -> None:
    with pytest.raises(Invalid, match=f"^offset: got {offset}, allowed 0 to 8$"):
        stream_of(engine, offset=offset)


@pytest.mark.parametrize("offset", [0, 8])
def test_an_offset_may_be_as_large_as_max_len(engine: Engine, offset: int) -> None:
    assert stream_of(engine, offset=offset).offset == offset


def test_the_type_is_checked_when_the_stream_opens(engine: Engine) -> None:
    with pytest.raises(Invalid, match=r"^dtype: got float64, allowed float32, float16, bfloat16$"):
        stream_of(engine, dtype="float64")


def test_the_type_holds_for_every_step(engine: Engine) -> None:
    stream = stream_of(engine, dtype="float16")
    assert [asyncio.run(stream.step(row(1))).tensors["embeddings"].dtype for _ in range(2)] == [np.float16] * 2


def test_a_step_whose_answer_cannot_be_given_has_not_been_made(engine: Engine) -> None:
    stream = stream_of(engine, "gpt", offset=1)

    async def fail() -> None:
        with stream.attempt():
            await stream.step(row(1, 2))
            assert stream.offset == 3
            raise Unavailable("queue", "full", "room")

    with pytest.raises(Unavailable):
        asyncio.run(fail())
    assert stream.offset == 1
