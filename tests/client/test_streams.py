"""Decode streams on a real server. Oracle: one call of the same client, itself tested against the native API."""

import asyncio
import json
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import preblock
from preblock.client import errors
from preblock.client.sync_stream import DecodeStream
from tests.client.conftest import Connect as Connecting
from tests.client.conftest import raises_kind
from tests.client.flaky_proxy import CUT, DROP, STALL, SWALLOW, Act, After, FlakyProxy, canned
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, free_port, serve

HEADER = struct.Struct("<4sBBHIIIB3s")
BUSY = canned("503 Service Unavailable", b'{"type":"urn:preblock:error:Unavailable","detail":"full"}')


@pytest.fixture(scope="module")
def rotary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model with rotary attention."""
    root = tmp_path_factory.mktemp("rotary")
    copy_artifact("llama", root)
    with serve(root) as server:
        yield server


def whole(client: Any, ids: Any, **fields: Any) -> Any:
    return client.embed(ids, **fields).vectors


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_steps_equal_one_call_bit_for_bit(tiny: Any, dtype: str) -> None:
    steps: list[Any] = [[1], np.array([2, 3], np.uint8), torch.tensor([4]), ((5, 6),)]
    with tiny.decode("bert", offset=1, dtype=dtype) as stream:
        parts = [stream.step(ids) for ids in steps]
        assert [part.shape for part in parts] == [(1, 1, 4), (1, 2, 4), (1, 1, 4), (1, 2, 4)]
        assert stream.offset == [7]
    expected = whole(tiny, [1, 2, 3, 4, 5, 6], model="bert", offset=1, dtype=dtype)
    found = np.concatenate(parts, 1)
    assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())
    parts[0][:] = 0


def test_a_stream_has_a_version(tiny: Any) -> None:
    with tiny.decode("bert", version=1) as stream:
        assert stream.version == 1
        assert np.array_equal(stream.step([1, 2]), whole(tiny, [1, 2], model="bert", version=1))
    with tiny.decode("bert") as stream:
        assert stream.version == 2


def test_rows_survive_rewind_reorder_and_resize(tiny: Any) -> None:
    def expect(vectors: Any, ids: Any, **fields: Any) -> None:
        expected = whole(tiny, ids, model="bert", **fields)
        assert (vectors.shape, vectors.tobytes()) == (expected.shape, expected.tobytes())

    with tiny.decode("bert", offset=[0, 3]) as stream:
        expect(stream.step([[1, 2], [3, 4]]), [[1, 2], [3, 4]], offset=[0, 3])
        expect(stream.step([[5, 6, 7], [8]]), [[5, 6, 7], [8]], offset=[2, 5])
        assert stream.step([[], [9]]).shape == (1, 4)
        assert stream.offset == [5, 7]
        stream.rewind([1, 7])
        stream.reorder([1, 0, 0])
        assert stream.offset == [7, 1, 1]
        stream.append(4)
        stream.append([0, 2])
        stream.drop([0, 4])
        stream.drop(3)
        assert stream.offset == [1, 1, 4]
        stream.rewind(1)
        stream.ping()
        segments = [[0, 1], [1, 1], [0, 0]]
        ids = np.array([[1, 2], [3, 4], [5, 6]])
        expect(stream.step(ids, token_type_ids=segments), ids, token_type_ids=segments, offset=1)
        mask = torch.tensor([[0, 1], [1, 1], [1, 0]])
        expect(stream.step(ids, attention_mask=mask), ids, attention_mask=mask, offset=3)
        assert stream.offset == [4, 5, 4]
        places = [[7, 0], [6, 5], [0, 1]]
        expect(stream.step(ids, position_ids=places), ids, position_ids=places)
        assert stream.offset == [8, 7, 2]
        stream.drop([2, 0, 1])
        assert stream.offset == []
        stream.append([7])
        expect(stream.step([3]), [3], offset=7)


def test_number_of_rows_may_be_given_and_may_be_0(tiny: Any) -> None:
    with tiny.decode("gpt", offset=2, rows=3) as stream:
        assert stream.offset == [2, 2, 2]
    none: list[dict[str, Any]] = [{"rows": 0}, {"offset": []}]
    for options in none:
        with tiny.decode("gpt", **options) as stream:
            assert stream.offset == []


def test_step_returns_the_requested_companion_outputs(connect: Connecting, rotary: Server) -> None:
    client = connect(rotary.address)
    names = ["rotary_cos", "rotary_sin"]
    with client.decode("llama", offset=3, companions=names) as stream:
        vectors = stream.step([[1, 2]])
        assert list(stream.companions) == names
        for name in names:
            expected = whole(client, [[1, 2]], model="llama", offset=3, output=name)
            assert np.array_equal(stream.companions[name], expected)
        assert np.array_equal(vectors, whole(client, [[1, 2]], model="llama"))


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        ([7], "input_ids[0][0]"),
        ([], "input_ids"),
        ([1] * 5, "offset"),
        ([[1], [2]], "input_ids"),
        ([[1, 2], [3]], "input_ids"),
        ([[[1]]], "input_ids"),
        ([[1], 2], "input_ids"),
        (1, "input_ids"),
        ([1.0], "input_ids"),
        ([2**63], "input_ids"),
        ([2**70], "input_ids"),
        (["a"], "input_ids"),
        ("a", "input_ids"),
        (np.zeros((1, 1, 1), np.int64), "input_ids"),
    ],
    ids=str,
)
def test_a_step_that_is_refused_changes_nothing(tiny: Any, ids: Any, field: str) -> None:
    with tiny.decode("gpt", offset=2) as stream:
        with raises_kind("Invalid") as raised:
            stream.step(ids)
        assert str(raised.value.field).startswith(field)
        assert stream.offset == [2]
        assert np.array_equal(stream.step([1, 2, 3, 4]), whole(tiny, [1, 2, 3, 4], model="gpt", offset=2))


@pytest.mark.parametrize(
    ("method", "argument", "kind", "field"),
    [
        ("rewind", 3, "Invalid", "rewind[0]"),
        ("rewind", [1, 1, 1], "Invalid", "rewind"),
        ("rewind", 1.5, "Invalid", "rewind"),
        ("rewind", [[1, 2]], "Invalid", "rewind"),
        ("reorder", [2], "Invalid", "reorder[0]"),
        ("reorder", [0] * 10**5, "TooLarge", "reorder"),
        ("append", [7], "Invalid", "append"),
        ("drop", [-1], "Invalid", "drop[0]"),
    ],
)
def test_refused_message_changes_nothing(tiny: Any, method: str, argument: Any, kind: str, field: str) -> None:
    with tiny.decode("gpt", offset=2, rows=2) as stream:
        with raises_kind(kind) as raised:
            getattr(stream, method)(argument)
        assert raised.value.field == field
        assert stream.offset == [2, 2]


def test_token_fields_must_be_known_and_of_equal_length(tiny: Any) -> None:
    with tiny.decode("gpt") as stream:
        for further in ({"attention_mask": [1]}, {"position_ids": [[1], [1]]}, {"token_type_ids": [0, 0]}):
            with raises_kind("Invalid") as raised:
                stream.step([1, 2], **further)
            assert raised.value.field in further
        assert stream.step([1, 2], attention_mask=[[0, 1]]).shape == (1, 2, 4)
        assert stream.offset == [1]


def test_step_beyond_the_last_position_is_refused(tiny: Any) -> None:
    with tiny.decode("gpt", offset=4) as stream:
        stream.step([1, 2])
        with raises_kind("Invalid", match="6") as raised:
            stream.step([1])
        assert raised.value.field == "offset[0] + tokens"
        stream.rewind(5)
        assert np.array_equal(stream.step([3]), whole(tiny, [3], model="gpt", offset=5))


@pytest.mark.parametrize(
    ("model", "options", "kind"),
    [
        ("none", {}, "NotFound"),
        ("gpt", {"version": 9}, "NotFound"),
        ("gpt", {"offset": 7}, "Invalid"),
        ("gpt", {"offset": [1, 2], "rows": 3}, "Invalid"),
        ("gpt", {"offset": [], "rows": 3}, "Invalid"),
        ("gpt", {"offset": "1"}, "Invalid"),
        ("gpt", {"rows": -1}, "Invalid"),
        ("gpt", {"rows": 10**6}, "TooLarge"),
        ("gpt", {"dtype": "float64"}, "Invalid"),
        ("gpt", {"output": "logits"}, "Invalid"),
        ("gpt", {"companions": ["embeddings"]}, "Invalid"),
    ],
)
def test_a_stream_that_is_refused(tiny: Any, model: str, options: dict[str, Any], kind: str) -> None:
    with raises_kind(kind), tiny.decode(model, **options):
        pass


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (DROP, "ConnectionFailed"),
        (CUT, "ConnectionFailed"),
        (STALL, "TimedOut"),
        (canned("503 Service Unavailable"), "Unavailable"),
        (canned("200 OK", b"<html>"), "status 200"),
    ],
    ids=range(5),
)
def test_a_stream_that_does_not_open(connect: Connecting, flaky: FlakyProxy, act: str | bytes, kind: str) -> None:
    flaky.script = [act]
    with raises_kind(kind), connect(flaky.address, timeout=0.5).decode("gpt"):
        pass
    assert flaky.connections == 1


def test_unreachable_server_is_a_connection_error(connect: Connecting) -> None:
    with pytest.raises(errors.ConnectionFailed), connect(f"http://127.0.0.1:{free_port()}").decode("gpt"):
        pass


def test_a_broken_stream_says_where_to_resume(connect: Connecting, flaky: FlakyProxy, tiny: Any) -> None:
    client = connect(flaky.address)
    parts = []
    with client.decode("gpt", offset=1) as stream:
        parts.append(stream.step([1, 2]))
        flaky.break_all()
        with pytest.raises(errors.StreamClosed, match=r"resumes at offset \[3\]$") as raised:
            stream.step([3, 4])
        with pytest.raises(errors.StreamClosed):
            stream.step([3, 4])
    assert flaky.connections == 1
    with client.decode("gpt", offset=raised.value.offset) as stream:
        parts.append(stream.step([3, 4]))
    assert np.array_equal(np.concatenate(parts, 1), whole(tiny, [1, 2, 3, 4], model="gpt", offset=1))


def decode_rows(client: Any) -> bytearray:
    """Run every operation of a decoder on rows at distinct offsets, and return the bytes of all answers."""
    found = bytearray()
    with client.decode("bert", offset=[0, 2], resume=True) as stream:
        for ids in ([[1], [2]], [[3, 4], []], [[5], [6]]):
            found += stream.step(ids).tobytes()
        stream.rewind([1, 3])
        stream.reorder([1, 0, 1])
        found += stream.step([[7], [8], [9]], token_type_ids=[[1], [0], [1]]).tobytes()
        stream.append(5)
        found += stream.step([[1], [], [], [10]]).tobytes()
        stream.drop([0])
        found += stream.step([[1], [2], [3]], position_ids=[[7], [2], [0]]).tobytes()
        assert stream.offset == [8, 3, 1]
    return found


@pytest.fixture(scope="module")
def impatient(tiny_repository: Path) -> Iterator[Server]:
    """A server with an idle timeout of one second for streams."""
    with serve(tiny_repository, PREBLOCK_STREAM_IDLE_TIMEOUT_SECONDS="1") as server:
        yield server


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_stream_resumes_wherever_its_connections_break(
    connect: Connecting, flaky: FlakyProxy, tiny: Any, direction: str
) -> None:
    """Connections are cut at bytes of the handshake, of the opening and of frames, before and in answers."""
    # A late cut follows a cut during the opening, so that pauses do not grow.
    early, late = [1, 150, 260, 300, 330, 345], [440, 461, 497, 540, 593, 660]
    flaky.script = [After(**{direction: byte}) for pair in zip(early, late, strict=True) for byte in pair]
    script: list[Act] = list(flaky.script)
    assert decode_rows(connect(flaky.address)) == decode_rows(tiny)
    assert flaky.connections > 4, f"{script} broke nothing"


def steps_done(server: Server) -> float:
    text = httpx.get(f"{server.address}/metrics", timeout=60).text
    (line,) = re.findall(r'^preblock_stream_operations_total\{.*"gpt".*"step".*\} (.*)$', text, re.MULTILINE)
    return float(line)


def test_step_with_a_lost_response_is_repeated(
    connect: Connecting, flaky: FlakyProxy, tiny: Any, tiny_server: Server
) -> None:
    with connect(flaky.address).decode("gpt", resume=True) as stream:
        stream.step([1])
        before = steps_done(tiny_server)
        flaky.hold()

        def lose_the_answer() -> None:
            while steps_done(tiny_server) == before:
                time.sleep(0.01)
            flaky.break_all()
            flaky.release()

        losing = threading.Thread(target=lose_the_answer)
        losing.start()
        assert np.array_equal(stream.step([2, 3]), whole(tiny, [2, 3], model="gpt", offset=1))
        losing.join()
        assert stream.offset == [3]
        assert np.array_equal(stream.step([4]), whole(tiny, [4], model="gpt", offset=3))
    assert flaky.connections == 2


@pytest.mark.parametrize("act", [DROP, SWALLOW, CUT, BUSY])
def test_resuming_ends_and_may_be_tried_again(connect: Connecting, flaky: FlakyProxy, tiny: Any, act: Act) -> None:
    with connect(flaky.address, retries=1).decode("gpt", resume=True) as stream:
        stream.step([1])
        flaky.script = [act] * 2
        flaky.break_all()
        kind = "Unavailable" if act == BUSY else "StreamClosed"
        with raises_kind(kind):
            stream.step([2])
        assert stream.offset == [1]
        assert np.array_equal(stream.step([2]), whole(tiny, [2], model="gpt", offset=1))
    assert flaky.connections == 4


def test_resuming_stream_is_opened_again_after_a_failure(connect: Connecting, flaky: FlakyProxy) -> None:
    flaky.script = [DROP, BUSY]
    with connect(flaky.address, retries=2).decode("gpt", resume=True) as stream:
        assert stream.offset == [0]
    with raises_kind("NotFound"), connect(flaky.address).decode("none", resume=True):
        pass
    assert flaky.connections == 4


def test_a_stream_resumes_in_the_version_that_it_began_with(
    connect: Connecting, tiny_repository: Path, tmp_path: Path
) -> None:
    (tmp_path / "bert").mkdir()
    shutil.copytree(tiny_repository / "bert" / "1", tmp_path / "bert" / "1")
    with (
        serve(tmp_path, PREBLOCK_MODEL_CONTROL="poll", PREBLOCK_MODEL_POLL_INTERVAL_SECONDS="0.1") as server,
        FlakyProxy(server.address) as flaky,
    ):
        client = connect(flaky.address)
        with client.decode("bert", resume=True) as stream:
            first = stream.step([1])
            shutil.copytree(tiny_repository / "bert" / "2", tmp_path / "new")
            (tmp_path / "new").rename(tmp_path / "bert" / "2")
            while client.model("bert").version != 2:
                time.sleep(0.05)
            flaky.break_all()
            stream.rewind(0)
            assert stream.version == 1
            assert np.array_equal(stream.step([1]), first)
            assert not np.array_equal(client.embed([1], model="bert").vectors, first)


def test_a_stream_resumes_at_another_server_when_its_own_stops(
    connect: Connecting, tiny: Any, tiny_server: Server, tiny_repository: Path
) -> None:
    with serve(tiny_repository) as stopping, FlakyProxy(stopping.address) as flaky:
        parts = []
        with connect(flaky.address).decode("gpt", resume=True) as stream:
            parts.append(stream.step([1, 2]))
            flaky.aim(tiny_server.address)
            stopping.process.terminate()
            stopping.process.wait(60)
            parts.append(stream.step([3, 4]))
    assert np.array_equal(np.concatenate(parts, 1), whole(tiny, [1, 2, 3, 4], model="gpt"))


def test_a_stream_that_idled_says_so_and_resumes(connect: Connecting, impatient: Server) -> None:
    client = connect(impatient.address)
    with (
        client.decode("gpt") as fresh,
        client.decode("gpt") as begun,
        client.decode("gpt", resume=True) as resumed,
    ):
        begun.step([1])
        resumed.step([1])
        time.sleep(1.3)
        for stream, offset in ((fresh, [0]), (begun, [1])):
            with pytest.raises(errors.StreamClosed, match="idle") as raised:
                stream.step([2])
            assert raised.value.offset == offset
        assert np.array_equal(resumed.step([2]), whole(client, [2], model="gpt", offset=1))


def test_a_step_without_an_answer_ends_the_stream(connect: Connecting, flaky: FlakyProxy) -> None:
    with connect(flaky.address, timeout=0.5).decode("gpt") as stream:
        stream.step([1])
        flaky.hold()
        start = time.monotonic()
        with pytest.raises(errors.StreamClosed, match="no answer in time") as raised:
            stream.step([2])
        assert raised.value.offset == stream.offset == [1]
        flaky.release()
        # Its late answer must not be taken for the answer to the next step.
        with pytest.raises(errors.StreamClosed, match="no answer in time"):
            stream.step([3])
    assert time.monotonic() - start < 5


def test_resuming_stream_continues_after_a_lost_answer(connect: Connecting, flaky: FlakyProxy, tiny: Any) -> None:
    with connect(flaky.address, timeout=0.5).decode("gpt", resume=True) as stream:
        stream.step([1])
        flaky.hold()
        with pytest.raises(errors.StreamClosed, match="no answer in time"):
            stream.step([2])
        flaky.release()
        assert np.array_equal(stream.step([3]), whole(tiny, [3], model="gpt", offset=1))


@pytest.mark.parametrize("resume", [False, True])
def test_a_step_that_is_cancelled_was_not_made(flaky: FlakyProxy, resume: bool) -> None:
    async def cancel() -> None:
        async with preblock.connect_async(flaky.address) as client, client.decode("gpt", resume=resume) as stream:
            flaky.hold()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.step([1]), 0.2)
            flaky.release()
            if resume:
                expected = await client.embed([2], model="gpt")
                assert np.array_equal(await stream.step([2]), expected.vectors)
                return
            with pytest.raises(errors.StreamClosed, match="not waited for") as raised:
                await stream.step([2])
            assert raised.value.offset == [0]

    asyncio.run(cancel())


def test_steps_of_one_stream_at_once_are_taken_in_turn(tiny_server: Server) -> None:
    async def together() -> None:
        async with preblock.connect_async(tiny_server.address) as client, client.decode("gpt") as stream:
            found = await asyncio.gather(*(stream.step([index]) for index in range(6)))
            expected = (await client.embed(list(range(6)), model="gpt")).vectors
            assert np.array_equal(np.concatenate(found, 1), expected)

    asyncio.run(together())


def test_streams_of_one_client_are_independent(tiny: Any) -> None:
    with tiny.decode("gpt") as one, tiny.decode("gpt", offset=3) as other:
        one.step([1])
        other.step([1])
        one.step([2, 3])
        assert (one.offset, other.offset) == ([3], [4])


FIELDS: dict[str, Any] = {"offset": [5], "rows": 1, "output": ["embeddings"], "dtype": "float32"}
OPENED = json.dumps({"version": 1, "next_offset": [5], "indices": ["token_type_ids"]}).encode()


class ScriptedSocket:
    """A socket for a test: `sent` holds the paths and the messages, `answers` the next answers or errors."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers = list(answers)
        self.sent: list[str | bytes] = []
        self.pauses: list[float] = []

    def connect(self, path: str) -> None:
        self.sent.append(path)

    def exchange(self, message: str | bytes) -> bytes:
        self.sent.append(message)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def close(self, kind: type[BaseException] | None, *_: object) -> None:
        self.sent.append(f"close after {kind}")


def opened(*answers: bytes | Exception, resume: bool = False) -> tuple[DecodeStream, ScriptedSocket]:
    """Return an open stream with one row at offset 5, and its socket."""
    socket: Any = ScriptedSocket(OPENED, *answers)
    stream = DecodeStream(socket, "m", None, dict(FIELDS), retries=1, resume=resume)
    stream.__enter__()
    assert socket.sent == ["/models/m/decode", json.dumps({"open": FIELDS})]
    socket.sent.clear()
    return stream, socket


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b'{"closing":"idle","next_offset":[5]}',
        HEADER.pack(b"INCQ", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 1, 2, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 2, 4, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 2, 2, 8, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 2, 2, 0, 2, 1, 1, 1, b"\1\0\0") + struct.pack("<qIIf", 6, 1, 1, 0.5),
        HEADER.pack(b"PRBK", 2, 10, 0, 1, 1, 0, 0, bytes(3)) + struct.pack("<q", 6),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 2, 1, b"\1\0\0") + struct.pack("<qIIf", 6, 1, 1, 0.5),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 9, b"\1\0\0") + struct.pack("<qIIf", 6, 1, 1, 0.5),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 1, b"\2\0\0") + struct.pack("<qIIIff", 6, 1, 1, 1, 0.5, 1),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0"),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0") + struct.pack("<qII", 6, 1, 1) + bytes(3),
        HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 1, 1, b"\1\0\0") + struct.pack("<qIIff", 6, 1, 1, 0.5, 1),
        HEADER.pack(b"PRBK", 2, 11, 0, 0, 1, 0, 0, bytes(3)) + struct.pack("<q", 5) + b"idle",
    ],
)
def test_a_frame_that_answers_nothing_closes_the_stream(frame: bytes) -> None:
    stream, _ = opened(frame)
    for _ in range(2):
        with pytest.raises(errors.StreamClosed) as raised:
            stream.step([1])
        assert raised.value.offset == stream.offset == [5]


@pytest.mark.parametrize("message", [b"", b"\xff", b"[]", b"{}"])
def test_opening_without_a_response_is_an_error(message: bytes) -> None:
    socket: Any = ScriptedSocket(message)
    with pytest.raises(errors.ConnectionFailed, match="the server opened no decode stream") as raised:
        DecodeStream(socket, "m", None, FIELDS, retries=0, resume=False).__enter__()
    assert socket.sent[-1] == f"close after {raised.type}"


def test_frames_as_the_document_has_them() -> None:
    answer = HEADER.pack(b"PRBK", 2, 2, 0, 1, 1, 2, 1, b"\1\0\0") + struct.pack("<qIIff", 7, 2, 1, 0.5, -2)
    state = HEADER.pack(b"PRBK", 2, 10, 0, 2, 1, 0, 0, bytes(3)) + struct.pack("<q", 6)
    stream, socket = opened(answer, state)
    assert stream.step([7, 8], token_type_ids=[0, 1]).tolist() == [[[0.5], [-2]]]
    header = HEADER.pack(b"PRBK", 2, 1, 256 + 4, 1, 1, 2, 0, bytes(3))
    assert socket.sent == [header + struct.pack("<qqqqqI", 7, 8, 0, 1, 5, 2)]
    assert stream.offset == [7]
    stream.rewind(6)
    assert socket.sent[1] == HEADER.pack(b"PRBK", 2, 4, 0, 2, 1, 0, 0, bytes(3)) + struct.pack("<q", 6)
    assert stream.offset == [6]


def test_refused_input_does_not_count_as_a_message() -> None:
    state = HEADER.pack(b"PRBK", 2, 10, 0, 1, 1, 0, 0, bytes(3)) + struct.pack("<q", 5)
    stream, _ = opened(state)
    with raises_kind("Invalid"):
        stream.step([1], word=[1])
    stream.ping()


def test_a_stream_that_resumes_connects_where_its_rows_are() -> None:
    state = HEADER.pack(b"PRBK", 2, 10, 0, 1, 2, 0, 0, bytes(3)) + struct.pack("<qq", 5, 5)
    stream, socket = opened(errors.ConnectionFailed("broke"), OPENED, state, resume=True)
    stream.reorder([0, 0])
    first, path, opening, again = socket.sent
    assert first == again
    assert path == "/models/m/versions/1/decode"
    assert json.loads(opening)["open"] == {"offset": [5], "rows": 1, "output": ["embeddings"], "dtype": "float32"}
    assert len(socket.pauses) == 1
    assert stream.offset == [5, 5]


def test_a_busy_service_is_asked_again_on_the_same_connection() -> None:
    """`retry_after` of an error in an open stream is its least pause; the message gets a new number."""
    busy = HEADER.pack(b"PRBK", 2, 3, 0, 1, 0, 0, 0, bytes(3))
    busy += b'{"type":"urn:preblock:error:Unavailable","status":503,"detail":"full","retry_after":2}'
    state = HEADER.pack(b"PRBK", 2, 10, 0, 2, 1, 0, 0, bytes(3)) + struct.pack("<q", 4)
    stream, socket = opened(busy, state)
    stream.rewind(4)
    assert [HEADER.unpack_from(frame)[4] for frame in socket.sent if isinstance(frame, bytes)] == [1, 2]
    assert len(socket.sent) == 2
    assert len(socket.pauses) == 1
    assert 2 <= socket.pauses[0] <= 2.25
    assert stream.offset == [4]


@pytest.mark.parametrize("stated", [b"", b',"retry_after":null', b',"retry_after":"soon"', b',"retry_after":31'])
def test_other_errors_of_a_stream_are_final(stated: bytes) -> None:
    refused = HEADER.pack(b"PRBK", 2, 3, 0, 1, 0, 0, 0, bytes(3))
    refused += b'{"type":"urn:preblock:error:Unavailable","status":503,"detail":"full"' + stated + b"}"
    stream, socket = opened(refused)
    with raises_kind("Unavailable"):
        stream.ping()
    assert socket.pauses == []


def test_a_stream_needs_no_with(tiny_server: Server) -> None:
    with preblock.connect(tiny_server.address) as client:
        stream = client.decode("gpt", offset=1, rows=2)
        assert (stream.offset, stream.version) == ([1, 1], None)
        assert np.array_equal(stream.step([[1], [2]]), whole(client, [[1], [2]], model="gpt", offset=1))
        assert (stream.offset, stream.version) == ([2, 2], 1)
        stream.close()
        with pytest.raises(errors.StreamClosed, match=r"closed by its user; a new stream resumes at offset \[2, 2\]"):
            stream.step([[1], [2]])
        with raises_kind("NotFound"):
            client.decode("none").step([1])


def test_an_asynchronous_stream_needs_no_with(tiny_server: Server) -> None:
    async def step() -> None:
        async with preblock.connect_async(tiny_server.address) as client:
            stream = client.decode("gpt", resume=True)
            assert (await stream.step([1])).shape == (1, 1, 4)
            await stream.aclose()
            with pytest.raises(errors.StreamClosed, match="closed by its user"):
                await stream.ping()

    asyncio.run(step())


def test_a_stream_left_open_does_not_hold_the_program(tiny_server: Server) -> None:
    script = f"import preblock; preblock.connect({tiny_server.address!r}).decode('gpt').step([1]); print('done')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_errors_of_a_stream_name_the_address(connect: Connecting, flaky: FlakyProxy) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(errors.ConnectionFailed, match=f"^no connection to {nowhere} "), connect(nowhere).decode("gpt"):
        pass
    with connect(flaky.address).decode("gpt") as stream:
        flaky.break_all()
        with pytest.raises(errors.StreamClosed, match=f"^the connection to {flaky.address} was closed "):
            stream.step([1])
