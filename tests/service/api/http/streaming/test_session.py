"""Streams of several rows on a real server, in JSON and in frames. Oracle: one call of the native API."""

import base64
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from websockets import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.support.decode_protocols import FRAME
from tests.support.protocols import Clients, Vectors, native_bytes
from tests.support.scrapes import read_metrics

KINDS = {"rewind": 4, "reorder": 5, "append": 6, "drop": 7, "ping": 8, "close": 9}
VECTORS, ERROR, STATE, CLOSING = 2, 3, 10, 11


@dataclass
class FrameAnswer:
    """An answer of either format."""

    kind: str
    offset: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tensors: list[Vectors] = field(default_factory=list)
    step: int = 0
    detail: str = ""
    status: int = 0


Ask = Callable[..., FrameAnswer]


def text(stream: ClientConnection, **fields: Any) -> FrameAnswer:
    """Send a message of JSON and read its answer."""
    stream.send(json.dumps(fields))
    document = json.loads(stream.recv())
    step = document.get("step", 0)
    if "error" in document:
        return FrameAnswer("error", step=step, detail=document["error"]["detail"], status=document["error"]["status"])
    offset = document["next_offset"]
    if "shape" not in document and "outputs" not in document:
        return FrameAnswer("closing" if "closing" in document else "state", offset, step=step)
    found = [(document["shape"], document["embeddings"])] if "shape" in document else []
    found += [(output["shape"], output["data"]) for output in document.get("outputs", {}).values()]
    tensors = [np.frombuffer(base64.b64decode(data), "<f4").reshape(-1, shape[-1]) for shape, data in found]
    lengths = document.get("lengths", [found[0][0][1]] * len(offset) if len(found[0][0]) == 3 else [])
    return FrameAnswer("vectors", offset, lengths, tensors, step)


def frame(stream: ClientConnection, **fields: Any) -> FrameAnswer:
    """Send a frame and read its answer."""
    number = fields.pop("step", 0)
    if "input_ids" in fields:
        rows = fields["input_ids"]
        names = ("input_ids", "position_ids", "attention_mask", "token_type_ids", "offset")
        bits = dict(zip(names, (0, 1, 2, 256, 4), strict=True))
        flags = sum(bits[name] for name in fields)
        body = b"".join(np.array(flat(fields[name]), "<i8").tobytes() for name in names if name in fields)
        lengths = np.array([len(row) for row in rows], "<u4")
        header = FRAME.pack(b"PRBK", 2, 1, flags, number, len(rows), int(lengths.sum()), 0, bytes(3))
        stream.send(header + body + lengths.tobytes())
    else:
        ((name, value),) = fields.items()
        values = [] if value is True else value
        header = FRAME.pack(b"PRBK", 2, KINDS[name], 0, number, len(values), 0, 0, bytes(3))
        stream.send(header + np.array(values, "<i8").tobytes())
    return read(stream.recv())


def flat(values: list[Any]) -> list[int]:
    return [value for row in values for value in (row if isinstance(row, list) else [row])]


def read(answer: Any) -> FrameAnswer:
    """Read a frame as `docs/decode.md` describes it."""
    magic, version, kind, flags, step, rows, tokens, dtype, last = FRAME.unpack_from(answer)
    assert (magic, version, flags) == (b"PRBK", 2, 0)
    body = answer[FRAME.size :]
    if kind == ERROR:
        problem = json.loads(body)
        return FrameAnswer("error", step=step, detail=problem["detail"], status=problem["status"])
    offset = list(struct.unpack_from(f"<{rows}q", body))
    body = body[8 * rows :]
    if kind != VECTORS:
        assert kind in (STATE, CLOSING)
        return FrameAnswer({STATE: "state", CLOSING: "closing"}[kind], offset, step=step, detail=body.decode())
    assert dtype == 1
    lengths = list(struct.unpack_from(f"<{rows}I", body))
    widths = struct.unpack_from(f"<{last[0]}I", body, 4 * rows)
    assert sum(lengths) == tokens
    at, tensors = 4 * rows + 4 * len(widths), []
    for width in widths:
        tensors.append(np.frombuffer(body, "<f4", tokens * width, at).reshape(tokens, width))
        at += 4 * tokens * width
    assert at == len(body)
    return FrameAnswer("vectors", offset, lengths, tensors, step)


@pytest.fixture(params=[text, frame])
def ask(request: pytest.FixtureRequest) -> Ask:
    asked: Ask = request.param
    return asked


def stream_of(clients: Clients, model: str, query: str = "") -> ClientConnection:
    return connect(f"{clients.socket}/models/{model}/decode{query}", max_size=None)


def expect(clients: Clients, answer: FrameAnswer, **fields: Any) -> None:
    """Compare the vectors of an answer with those of one request."""
    assert answer.kind == "vectors", answer
    assert answer.tensors[0].tobytes() == native_bytes(clients, "bert", fields).tobytes()


def test_rows_survive_rewind_reorder_and_resize(tiny_clients: Clients, ask: Ask) -> None:
    with stream_of(tiny_clients, "bert", "?offset=[0,2,0]") as stream:
        answer = ask(stream, input_ids=[[1, 2], [3], [4, 5, 6]])
        assert (answer.offset, answer.lengths) == ([2, 3, 3], [2, 1, 3])
        expect(tiny_clients, answer, input_ids=[[1, 2], [3], [4, 5, 6]], offset=[0, 2, 0])
        answer = ask(stream, input_ids=[[7], [], [8]])
        assert (answer.offset, answer.lengths) == ([3, 3, 4], [1, 0, 1])
        expect(tiny_clients, answer, input_ids=[[7], [8]], offset=[2, 3])
        assert ask(stream, reorder=[2, 0, 0]) == FrameAnswer("state", [4, 3, 3])
        assert ask(stream, rewind=[2, 3, 1]) == FrameAnswer("state", [2, 3, 1])
        answer = ask(stream, input_ids=[[1], [2], [3]])
        assert (answer.offset, answer.lengths) == ([3, 4, 2], [1, 1, 1])
        expect(tiny_clients, answer, input_ids=[[1], [2], [3]], offset=[2, 3, 1])
        assert ask(stream, append=[6, 0]) == FrameAnswer("state", [3, 4, 2, 6, 0])
        assert ask(stream, drop=[0, 2]) == FrameAnswer("state", [4, 6, 0])
        expect(tiny_clients, ask(stream, input_ids=[[9], [9], [9]]), input_ids=[[9], [9], [9]], offset=[4, 6, 0])
        assert ask(stream, ping=True) == FrameAnswer("state", [5, 7, 1])
        closing = ask(stream, close=True)
        assert (closing.kind, closing.offset) == ("closing", [5, 7, 1])
        with pytest.raises(ConnectionClosed) as closed:
            stream.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, json.loads(closed.value.rcvd.reason)["next_offset"]) == (1000, [5, 7, 1])


def test_segments_masks_and_positions_work_in_every_format(tiny_clients: Clients, ask: Ask) -> None:
    with stream_of(tiny_clients, "bert", "?rows=2") as stream:
        fields = {"input_ids": [[1, 2], [3]], "token_type_ids": [[0, 1], [1]], "attention_mask": [[0, 1], [1]]}
        answer = ask(stream, **fields, offset=[0, 0])
        expect(tiny_clients, answer, **fields)
        assert answer.offset == [1, 1]
        fields = {"input_ids": [[1, 2], [3]], "token_type_ids": [[0, 1], [1]], "position_ids": [[5, 2], [7]]}
        expect(tiny_clients, ask(stream, **fields), **fields)
        assert ask(stream, ping=True).offset == [6, 8]


def test_step_returns_requested_outputs(tiny_clients: Clients, ask: Ask) -> None:
    fields = {"input_ids": [[1, 2], [3]], "offset": [1, 0]}
    with stream_of(tiny_clients, "bert", "?offset=[1,0]&output=token_embeddings,embeddings") as stream:
        answer = ask(stream, input_ids=fields["input_ids"])
    lookup = tiny_clients.http.post(
        "/models/bert/embed",
        json=fields | {"output": "token_embeddings"},
        headers={"Accept": "application/octet-stream"},
    )
    assert [tensor.tobytes() for tensor in answer.tensors] == [
        lookup.content,
        native_bytes(tiny_clients, "bert", fields).tobytes(),
    ]


def test_repeated_step_is_answered_again(tiny_clients: Clients, ask: Ask) -> None:
    with stream_of(tiny_clients, "gpt", "?rows=2") as stream:
        first, again = (ask(stream, input_ids=[[1], [2, 3]], offset=[0, 0], step=7) for _ in range(2))
        assert (first.step, first.offset, again.offset) == (7, [1, 2], [1, 2])
        assert first.tensors[0].tobytes() == again.tensors[0].tobytes()
        assert [ask(stream, append=[5], step=8) for _ in range(2)] == [FrameAnswer("state", [1, 2, 5], step=8)] * 2
        conflict = ask(stream, append=[4], step=8)
        assert (conflict.status, conflict.step, conflict.detail) == (
            409,
            8,
            "step: got 8, expected more than 8, or 8 again with the same content",
        )
        assert ask(stream, input_ids=[[1], [1], [1]], step=9).offset == [2, 3, 6]


def test_full_stream_stays_open_for_rewind(tiny_clients: Clients, ask: Ask) -> None:
    with stream_of(tiny_clients, "gpt", "?offset=[4,0]") as stream:
        assert ask(stream, input_ids=[[1, 2], [1]]).offset == [6, 1]
        refused = ask(stream, input_ids=[[1], [1]])
        assert refused.detail == "offset[0] + tokens: got 6 + 1 = 7, expected at most 6, the max_len of this model"
        assert ask(stream, input_ids=[[], [1]]).offset == [6, 2]
        assert ask(stream, rewind=[5, 2]).offset == [5, 2]
        assert ask(stream, input_ids=[[1], [1]]).offset == [6, 3]


def test_first_message_can_open_the_stream(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt") as stream:
        stream.send(json.dumps({"open": {"offset": [1, 2], "output": ["embeddings", "token_embeddings"]}}))
        assert json.loads(stream.recv()) == {
            "model": "gpt",
            "version": 1,
            "identity": tiny_clients.http.get("/models/gpt").json()["identity"],
            "max_len": 6,
            "outputs": {"embeddings": 4, "token_embeddings": 4},
            "indices": [],
            "next_offset": [1, 2],
        }
        answer = text(stream, input_ids=[[1], [2]])
        assert (answer.offset, len(answer.tensors)) == ([2, 3], 2)


@pytest.mark.parametrize("first", ['{"open": {}}', '{"ping": true}'])
def test_later_open_message_is_refused(tiny_clients: Clients, first: str) -> None:
    with stream_of(tiny_clients, "gpt", "?offset=5") as stream:
        stream.send(first)
        assert json.loads(stream.recv())["next_offset"] == [5]
        refused = text(stream, open={"rows": 2})
        assert (refused.status, refused.detail) == (409, "an open message must be the first message of its stream")
        assert text(stream, ping=True).offset == [5]


def test_open_message_adds_to_the_query(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt", "?rows=3&output=token_embeddings&dtype=float16") as stream:
        stream.send('{"open": {"offset": 2, "encoding": "float"}}')
        assert json.loads(stream.recv())["next_offset"] == [2, 2, 2]
        stream.send('{"input_ids": [[1], [2], [3]]}')
        answer = json.loads(stream.recv())
    fields = {"input_ids": [[1], [2], [3]], "offset": 2, "output": "token_embeddings", "dtype": "float16"}
    assert answer == tiny_clients.http.post("/models/gpt/embed", json=fields | {"encoding": "float"}).json()


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"open": {"rows": -1}}, "rows: got -1, expected a number of rows"),
        ({"open": {"offset": 3}}, "offset is both in the query and in the open message; send it in one of them"),
        ({"open": {"nope": 1}}, "unknown field nope"),
        ({"open": []}, "open: got [], expected a JSON object"),
        ({"open": {}, "step": 1}, "unknown field step"),
    ],
)
def test_bad_open_message_leaves_stream_unchanged(tiny_clients: Clients, fields: dict[str, Any], detail: str) -> None:
    with stream_of(tiny_clients, "gpt", "?offset=5") as stream:
        assert text(stream, **fields).detail.startswith(detail)
        stream.send('{"open": {"rows": 2}}')
        assert json.loads(stream.recv())["next_offset"] == [5, 5]


def test_pipelined_messages_are_answered_in_order(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt") as stream:
        for _ in range(500):
            stream.send(json.dumps({"input_ids": [1, 2]}))
            stream.send(json.dumps({"rewind": 0}))
        offsets = [json.loads(stream.recv())["next_offset"] for _ in range(1000)]
    assert offsets == [[2], [0]] * 500


def test_stream_without_rows_accepts_append(tiny_clients: Clients, ask: Ask) -> None:
    with stream_of(tiny_clients, "gpt", "?rows=0") as stream:
        assert ask(stream, ping=True).offset == []
        assert ask(stream, drop=[0]).detail == "drop[0]: got 0, expected nothing, since the stream has no rows"
        assert ask(stream, append=[0, 3]).offset == [0, 3]
        assert ask(stream, input_ids=[[1], [1]]).offset == [1, 4]


def test_successful_operations_are_counted(counted_clients: Clients) -> None:
    def counts() -> dict[str, float]:
        name = "preblock_stream_operations_total", "gpt"
        return {labels[2]: value for labels, value in read_metrics(counted_clients.http).items() if labels[:2] == name}

    with stream_of(counted_clients, "gpt") as stream:
        text(stream, input_ids=[1])
        text(stream, rewind=[0])
        before = counts()
        text(stream, input_ids=[1])
        text(stream, input_ids=[7])
        frame(stream, rewind=[0])
        after = counts()
    assert (after["step"] - before["step"], after["rewind"] - before["rewind"]) == (1, 1)
