"""The streaming protocol on a real server. Oracles: one call of the native API, the raw tables, the layout in words."""

import asyncio
import base64
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from websockets import ConnectionClosed, InvalidStatus
from websockets.asyncio.client import connect as connect_async
from websockets.sync.client import ClientConnection, connect

from tests.service.api.http.routes.bad_messages import BAD_FRAMES, BAD_TEXT
from tests.support.decode_protocols import FRAME, read_vectors, step_frame
from tests.support.protocols import ERROR, VECTORS, Clients, Vectors, native_bytes
from tests.support.scrapes import wait_for_streams


@contextmanager
def stream_of(clients: Clients, model: str, query: str = "") -> Iterator[ClientConnection]:
    with connect(f"{clients.socket}/models/{model}/decode{query}", max_size=None) as stream:
        yield stream


def send_text(stream: ClientConnection, **fields: Any) -> dict[str, Any]:
    stream.send(json.dumps(fields))
    answer = stream.recv()
    assert isinstance(answer, str)
    document: dict[str, Any] = json.loads(answer)
    return document


def send_frame(stream: ClientConnection, frame: bytes) -> bytes:
    stream.send(frame)
    answer = stream.recv()
    assert isinstance(answer, bytes)
    return answer


def vectors_of(answer: bytes | dict[str, Any]) -> Vectors:
    """Return the float32 vectors (T, D) of an answer of either kind."""
    if isinstance(answer, bytes):
        assert answer[5] == VECTORS, answer
        return read_vectors(answer)
    return np.frombuffer(base64.b64decode(answer["embeddings"]), "<f4").reshape(-1, answer["shape"][-1])


@pytest.mark.parametrize("model", ["gpt2-small", "minilm", "transformer-base"])
@pytest.mark.parametrize("kinds", ["text", "frame", "both"])
def test_decode_steps_equal_one_call_bit_for_bit(model_clients: Clients, model: str, kinds: str) -> None:
    ids = np.random.default_rng(0).integers(0, 30000, 30).tolist()
    parts, start = [], 0
    with stream_of(model_clients, model) as stream:
        for number, length in enumerate((1, 1, 5, 1, 20, 2)):
            step = ids[start : start + length]
            if kinds == "frame" or (kinds == "both" and number % 2):
                parts.append(vectors_of(send_frame(stream, step_frame(step))))
            else:
                parts.append(vectors_of(send_text(stream, input_ids=step)))
            start += length
    assert np.concatenate(parts).tobytes() == native_bytes(model_clients, model, {"input_ids": ids}).tobytes()


def test_decode_text_response_equals_embed(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt", "?offset=2") as stream:
        answer = send_text(stream, input_ids=[1, 2, 3])
    assert answer == tiny_clients.http.post("/models/gpt/embed", json={"input_ids": [1, 2, 3], "offset": 2}).json()


def test_decode_frame_has_documented_layout(tiny_clients: Clients, tiny_tables: dict[str, Any]) -> None:
    with stream_of(tiny_clients, "gpt", "?offset=3") as stream:
        frame = send_frame(stream, step_frame([4, 5], number=0xFFFFFFFE))
    expected = tiny_tables["tokens"][[4, 5]] + tiny_tables["positions"][[3, 4]]
    assert frame == (
        b"PRBK"  # magic
        + bytes([2, 2, 0, 0])  # version 2, kind vectors, flags 0
        + struct.pack("<III", 0xFFFFFFFE, 1, 2)  # step, rows, tokens
        + bytes([1, 1, 0, 0])  # float32, one output
        + struct.pack("<q", 5)  # next offset
        + struct.pack("<I", 2)  # length of the row
        + struct.pack("<I", 4)  # width
        + expected.tobytes()
    )


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("float16", 2), ("bfloat16", 3)])
def test_query_dtype_applies_to_text_and_frames(tiny_clients: Clients, dtype: str, code: int) -> None:
    content = tiny_clients.http.post(
        "/models/gpt/embed", json={"input_ids": [1, 2], "dtype": dtype}, headers={"Accept": "application/octet-stream"}
    ).content
    with stream_of(tiny_clients, "gpt", f"?dtype={dtype}") as stream:
        frame = send_frame(stream, step_frame([1, 2]))
    with stream_of(tiny_clients, "gpt", f"?dtype={dtype}") as stream:
        answer = send_text(stream, input_ids=[1, 2])
    assert frame[20] == code
    assert frame[FRAME.size + 16 :] == content
    assert answer["dtype"] == dtype
    assert base64.b64decode(answer["embeddings"]) == content


@pytest.mark.parametrize("version", [1, 2])
def test_decode_uses_requested_version(tiny_clients: Clients, version: int) -> None:
    with connect(f"{tiny_clients.socket}/models/bert/versions/{version}/decode") as stream:
        assert send_text(stream, input_ids=[1])["version"] == version


def test_decode_streams_are_independent(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt") as one, stream_of(tiny_clients, "gpt", "?offset=3") as other:
        assert send_text(one, input_ids=[1])["next_offset"] == [1]
        assert send_text(other, input_ids=[1])["next_offset"] == [4]
        assert send_text(one, input_ids=[1])["next_offset"] == [2]


def test_bad_text_leaves_decode_stream_usable(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt") as stream:
        first = send_text(stream, input_ids=[3])
        for text, detail in BAD_TEXT:
            stream.send(text)
            error = json.loads(stream.recv())
            assert list(error) == ["error"], text
            assert error["error"]["detail"].startswith(detail), text
            assert error["error"]["status"] in (400, 409, 422)
        second = send_text(stream, input_ids=[5])
    check_both(tiny_clients, first, second)


def test_bad_frame_leaves_decode_stream_usable(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt") as stream:
        first = send_frame(stream, step_frame([3]))
        for frame, detail in BAD_FRAMES:
            answer = send_frame(stream, frame)
            assert answer[: FRAME.size] == FRAME.pack(b"PRBK", 2, ERROR, 0, 77, 0, 0, 0, bytes(3))
            assert json.loads(answer[FRAME.size :])["detail"].startswith(detail), frame
        second = send_frame(stream, step_frame([5]))
    check_both(tiny_clients, first, second)


def check_both(clients: Clients, *steps: Any) -> None:
    """Check that the two steps have the vectors of one request."""
    both = native_bytes(clients, "gpt", {"input_ids": [3, 5]})
    assert np.concatenate([vectors_of(step) for step in steps]).tobytes() == both.tobytes()


@pytest.mark.parametrize(
    ("path", "status", "detail"),
    [
        ("nope/decode", 404, "model: got nope"),
        ("bert/versions/3/decode", 404, "version: got 3"),
        ("gpt/decode?offset=7", 422, "offset: got 7"),
        ("gpt/decode?offset=9223372036854775807", 422, "offset: got 9223372036854775807"),
        ("gpt/decode?offset=1.0", 422, "offset: got 1.0"),
        ("gpt/decode?offset=[0,7]", 422, "offset[1]: got 7"),
        ("gpt/decode?offset=[0,1]&rows=3", 422, "offset: got 2 values"),
        ("gpt/decode?rows=-1", 422, "rows: got -1"),
        ("gpt/decode?rows=1000000000000", 413, "rows: got 1000000000000 rows"),
        ("gpt/decode?output=rotary_cos", 422, "output: got rotary_cos"),
        ("gpt/decode?output=embeddings,embeddings", 422, "output: got"),
        ("gpt/decode?offset=x", 400, "offset: got x"),
        ("gpt/decode?offset=1&offset=2", 422, "the query has 2 values of offset; send one"),
        ("gpt/decode?dtype=int8", 422, "dtype: got int8"),
        ("gpt/decode?encoding=hex", 422, "encoding: got hex"),
        ("gpt/decode?nope=1", 422, "unknown field nope"),
    ],
)
def test_bad_decode_handshake_is_rejected(tiny_clients: Clients, path: str, status: int, detail: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(f"{tiny_clients.socket}/models/{path}"):
        pass
    response = refused.value.response
    assert response.status_code == status
    assert response.headers["Content-Type"] == "application/problem+json"
    assert json.loads(response.body or b"")["detail"].startswith(detail)


def test_stream_gauge_counts_open_streams(counted_clients: Clients) -> None:
    wait_for_streams(counted_clients.http, 0)
    with stream_of(counted_clients, "gpt") as one, stream_of(counted_clients, "gpt"):
        send_text(one, input_ids=[1])
        wait_for_streams(counted_clients.http, 2)
    wait_for_streams(counted_clients.http, 0)


@pytest.mark.parametrize("busy", [False, True])
def test_abrupt_disconnect_leaves_server_healthy(counted_clients: Clients, busy: bool) -> None:
    async def leave_without_a_word() -> None:
        async with connect_async(f"{counted_clients.socket}/models/gpt/decode") as stream:
            await stream.send('{"input_ids": [1]}')
            await stream.recv()
            await asyncio.to_thread(wait_for_streams, counted_clients.http, 1)
            if busy:  # the server is about to answer
                await stream.send(step_frame([0] * 1000))
            stream.transport.abort()

    wait_for_streams(counted_clients.http, 0)
    asyncio.run(leave_without_a_word())
    wait_for_streams(counted_clients.http, 0)
    with stream_of(counted_clients, "gpt") as other:
        assert send_text(other, input_ids=[1])["next_offset"] == [1]


def test_oversized_message_ends_only_its_own_stream(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt") as other:
        with stream_of(tiny_clients, "gpt") as stream:
            # The first bytes of a masked binary message; the rest never comes (RFC 6455, section 5.2).
            stream.socket.sendall(b"\x82\xff" + struct.pack(">Q", 16 * 2**20 + 1) + bytes(4))
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        assert send_text(other, input_ids=[1])["next_offset"] == [1]
