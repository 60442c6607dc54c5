"""Decode streams on a real server. Oracle: one call of the same client, which is proven against the native door."""

import asyncio
import struct
import time
from typing import Any

import numpy as np
import pytest
import torch

import incipit
from incipit.client import errors
from incipit.client.sequence import Sequence
from tests.client.conftest import Connect
from tests.client.flaky import CUT, DROP, STALL, FlakyProxy, canned
from tests.conftest import free_port

HEADER = struct.Struct("<4sBBHIIIB3s")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_steps_equal_one_call_bit_for_bit(tiny: Any, dtype: str) -> None:
    steps: list[Any] = [[1], np.array([2, 3], np.uint8), torch.tensor([4]), ((5, 6),)]
    with tiny.decode("bert", offset=1, dtype=dtype) as stream:
        parts = [stream.step(ids) for ids in steps]
        assert [part.shape for part in parts] == [(1, 1, 4), (1, 2, 4), (1, 1, 4), (1, 2, 4)]
        assert stream.offset == 7
    whole = tiny.embed([1, 2, 3, 4, 5, 6], model="bert", offset=1, dtype=dtype).vectors
    found = np.concatenate(parts, 1)
    assert (found.dtype, found.tobytes()) == (whole.dtype, whole.tobytes())
    parts[0][:] = 0


def test_a_stream_has_a_version(tiny: Any) -> None:
    with tiny.decode("bert", version=1) as stream:
        assert np.array_equal(stream.step([1, 2]), tiny.embed([1, 2], model="bert", version=1).vectors)


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        ([7], "input_ids[0][0]"),
        ([], "input_ids"),
        ([1] * 5, "offset"),
        ([[1], [2]], "input_ids"),
        ([[1, 2], [3]], "input_ids"),
        ([[[1]]], "input_ids"),
        (1, "input_ids"),
        ([1.0], "input_ids"),
        ([2**63], "input_ids"),
        ([2**70], "input_ids"),
        (["a"], "input_ids"),
    ],
    ids=str,
)
def test_a_step_that_is_refused_changes_nothing(tiny: Any, ids: Any, field: str) -> None:
    with tiny.decode("gpt", offset=2) as stream:
        with pytest.raises(errors.Invalid) as raised:
            stream.step(ids)
        assert str(raised.value.field).startswith(field)
        assert stream.offset == 2
        assert np.array_equal(stream.step([1, 2, 3, 4]), tiny.embed([1, 2, 3, 4], model="gpt", offset=2).vectors)


@pytest.mark.parametrize(
    ("model", "options", "kind"),
    [
        ("none", {}, errors.NotFound),
        ("gpt", {"version": 9}, errors.NotFound),
        ("gpt", {"offset": 7}, errors.Invalid),
        ("gpt", {"dtype": "float64"}, errors.Invalid),
    ],
)
def test_a_stream_that_is_refused(tiny: Any, model: str, options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind), tiny.decode(model, **options):
        pass


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (DROP, errors.ConnectionFailed),
        (CUT, errors.ConnectionFailed),
        (STALL, errors.TimedOut),
        (canned("503 Service Unavailable"), errors.Unavailable),
        (canned("200 OK", b"<html>"), errors.ServiceError),
    ],
    ids=range(5),
)
def test_a_stream_that_does_not_open(
    connect: Connect, flaky: FlakyProxy, act: str | bytes, kind: type[Exception]
) -> None:
    flaky.script = [act]
    with pytest.raises(kind), connect(flaky.address, timeout=0.5).decode("gpt"):
        pass
    assert flaky.connections == 1


def test_nobody_listens(connect: Connect) -> None:
    with pytest.raises(errors.ConnectionFailed), connect(f"http://127.0.0.1:{free_port()}").decode("gpt"):
        pass


def test_a_broken_stream_says_where_to_resume(connect: Connect, flaky: FlakyProxy, tiny: Any) -> None:
    client = connect(flaky.address)
    parts = []
    with client.decode("gpt", offset=1) as stream:
        parts.append(stream.step([1, 2]))
        flaky.break_all()
        with pytest.raises(errors.StreamClosed, match=r"resumes at offset 3$") as raised:
            stream.step([3, 4])
        with pytest.raises(errors.StreamClosed):
            stream.step([3, 4])
    assert flaky.connections == 1
    with client.decode("gpt", offset=raised.value.offset) as stream:
        parts.append(stream.step([3, 4]))
    assert np.array_equal(np.concatenate(parts, 1), tiny.embed([1, 2, 3, 4], model="gpt", offset=1).vectors)


def test_a_step_without_an_answer_ends_the_stream(connect: Connect, flaky: FlakyProxy) -> None:
    with connect(flaky.address, timeout=0.5).decode("gpt") as stream:
        stream.step([1])
        flaky.hold()
        start = time.monotonic()
        with pytest.raises(errors.StreamClosed, match="no answer in time") as raised:
            stream.step([2])
        assert raised.value.offset == stream.offset == 1
        flaky.release()
        # Its answer may come now, and must not be taken for that of the next step.
        with pytest.raises(errors.StreamClosed, match="not waited for"):
            stream.step([3])
    assert time.monotonic() - start < 5


def test_a_step_that_is_cancelled_ends_the_stream(flaky: FlakyProxy) -> None:
    async def cancel() -> None:
        async with incipit.connect_async(flaky.address) as client, client.decode("gpt") as stream:
            flaky.hold()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.step([1]), 0.2)
            flaky.release()
            with pytest.raises(errors.StreamClosed) as raised:
                await stream.step([2])
            assert raised.value.offset == 0

    asyncio.run(cancel())


def test_streams_of_one_client_are_apart(tiny: Any) -> None:
    with tiny.decode("gpt") as one, tiny.decode("gpt", offset=3) as other:
        one.step([1])
        other.step([1])
        one.step([2, 3])
        assert (one.offset, other.offset) == (3, 4)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        HEADER.pack(b"INCQ", 1, 2, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"INCP", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"INCP", 1, 4, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"INCP", 1, 2, 8, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"INCP", 1, 2, 0, 2, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"INCP", 1, 2, 0, 1, 2, 1, 1, b"\1\0\0"),
        HEADER.pack(b"INCP", 1, 2, 0, 1, 1, 1, 9, b"\1\0\0"),
        HEADER.pack(b"INCP", 1, 2, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"INCP", 1, 2, 0, 1, 1, 1, 1, b"\1\0\0") + bytes(15),
    ],
    ids=["empty", "magic", "version", "kind", "flags", "number", "rows", "dtype", "no-body", "short-body"],
)
def test_a_frame_that_answers_nothing_closes_the_stream(frame: bytes) -> None:
    sequence = Sequence(5)
    sequence.ask([1])
    with pytest.raises(errors.StreamClosed) as raised:
        sequence.answer(frame)
    assert raised.value.offset == sequence.offset == 5
    with pytest.raises(errors.StreamClosed):
        sequence.ask([1])


def test_a_frame_as_the_document_has_it() -> None:
    sequence = Sequence(5)
    assert sequence.ask([7, 8]) == HEADER.pack(b"INCP", 1, 1, 0, 1, 1, 2, 0, bytes(3)) + struct.pack("<qqI", 7, 8, 2)
    answer = HEADER.pack(b"INCP", 1, 2, 0, 1, 1, 2, 1, b"\1\0\0") + struct.pack("<qIff", 7, 2, 0.5, -2)
    assert sequence.answer(answer).tolist() == [[[0.5], [-2]]]
    assert sequence.offset == 7
