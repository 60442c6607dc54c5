"""Streams of several rows on a real server, in JSON and in frames. Oracle: one call of the native API."""

import json
from typing import Any

import pytest
from websockets import ConnectionClosed

from tests.service.api.http.native_requests import BYTES, ask, told
from tests.service.api.http.streaming.frames import Ask, StreamAnswer, as_frame, as_text, stream_of, tell
from tests.support.protocols import Clients, native_bytes
from tests.support.scrapes import read_metrics


@pytest.fixture(params=[as_text, as_frame])
def send(request: pytest.FixtureRequest) -> Ask:
    asked: Ask = request.param
    return asked


def expect(clients: Clients, answer: StreamAnswer, **fields: Any) -> None:
    """Compare the vectors of an answer with those of one request."""
    assert answer.kind == "vectors", answer
    assert answer.tensors[0].tobytes() == native_bytes(clients, "bert", fields).tobytes()


def test_rows_survive_rewind_reorder_and_resize(tiny_clients: Clients, send: Ask) -> None:
    with stream_of(tiny_clients, "bert?offset=[0,2,0]") as stream:
        answer = send(stream, input_ids=[[1, 2], [3], [4, 5, 6]])
        assert (answer.offset, answer.lengths) == ([2, 3, 3], [2, 1, 3])
        expect(tiny_clients, answer, input_ids=[[1, 2], [3], [4, 5, 6]], offset=[0, 2, 0])
        answer = send(stream, input_ids=[[7], [], [8]])
        assert (answer.offset, answer.lengths) == ([3, 3, 4], [1, 0, 1])
        expect(tiny_clients, answer, input_ids=[[7], [8]], offset=[2, 3])
        assert send(stream, reorder=[2, 0, 0]) == StreamAnswer("state", [4, 3, 3])
        assert send(stream, rewind=[2, 3, 1]) == StreamAnswer("state", [2, 3, 1])
        expect(tiny_clients, send(stream, input_ids=[[1], [2], [3]]), input_ids=[[1], [2], [3]], offset=[2, 3, 1])
        assert send(stream, append=[6, 0]) == StreamAnswer("state", [3, 4, 2, 6, 0])
        assert send(stream, drop=[0, 2]) == StreamAnswer("state", [4, 6, 0])
        expect(tiny_clients, send(stream, input_ids=[[9], [9], [9]]), input_ids=[[9], [9], [9]], offset=[4, 6, 0])
        assert send(stream, ping=True) == StreamAnswer("state", [5, 7, 1])
        closing = send(stream, close=True)
        assert (closing.kind, closing.offset) == ("closing", [5, 7, 1])
        with pytest.raises(ConnectionClosed) as closed:
            stream.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, json.loads(closed.value.rcvd.reason)["next_offset"]) == (1000, [5, 7, 1])


def test_every_input_and_output_works_in_every_format(tiny_clients: Clients, send: Ask) -> None:
    ids, segments = [[1, 2], [3]], [[0, 1], [1]]
    with stream_of(tiny_clients, "bert?rows=2&output=embeddings,token_embeddings") as stream:
        fields: dict[str, Any] = {"input_ids": ids, "token_type_ids": segments, "attention_mask": [[0, 1], [1]]}
        answer = send(stream, **fields, offset=[0, 0])
        expect(tiny_clients, answer, **fields)
        assert answer.offset == [1, 1]
        fields = {"input_ids": ids, "token_type_ids": segments, "position_ids": [[5, 2], [7]]}
        answer = send(stream, **fields)
        expect(tiny_clients, answer, **fields)
        lookup = ask(tiny_clients.http, "bert", BYTES, output="token_embeddings", **fields)
        assert answer.tensors[1].tobytes() == lookup.content
        assert send(stream, ping=True).offset == [6, 8]


def test_repeated_step_is_answered_again(tiny_clients: Clients, send: Ask) -> None:
    with stream_of(tiny_clients, "gpt?rows=0") as stream:
        assert send(stream, drop=[0]).detail == "drop[0]: got 0, expected nothing, since the stream has no rows"
        assert send(stream, append=[0, 0]).offset == [0, 0]
        first, again = (send(stream, input_ids=[[1], [2, 3]], offset=[0, 0], step=7) for _ in range(2))
        assert (first.step, first.offset, again.offset) == (7, [1, 2], [1, 2])
        assert first.tensors[0].tobytes() == again.tensors[0].tobytes()
        assert [send(stream, append=[5], step=8) for _ in range(2)] == [StreamAnswer("state", [1, 2, 5], step=8)] * 2
        conflict = send(stream, append=[4], step=8)
        assert (conflict.status, conflict.step) == (409, 8)
        assert conflict.detail == "step: got 8, expected more than 8, or 8 again with the same content"
        assert send(stream, input_ids=[[1], [1], [1]], step=9).offset == [2, 3, 6]


def test_first_message_can_open_the_stream(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt") as stream:
        assert tell(stream, open={"offset": [1, 2], "output": ["embeddings", "token_embeddings"]}) == {
            "model": "gpt",
            "version": 1,
            "identity": tiny_clients.http.get("/models/gpt").json()["identity"],
            "max_len": 6,
            "outputs": {"embeddings": 4, "token_embeddings": 4},
            "indices": [],
            "next_offset": [1, 2],
        }
        answer = as_text(stream, input_ids=[[1], [2]])
        assert (answer.offset, len(answer.tensors)) == ([2, 3], 2)
        assert as_text(stream, open={"rows": 2}).status == 409
    with stream_of(tiny_clients, "gpt?rows=3&output=token_embeddings&dtype=float16") as stream:
        assert tell(stream, open={"offset": 2, "encoding": "float"})["next_offset"] == [2, 2, 2]
        answer = tell(stream, input_ids=[[1], [2], [3]])
    fields: dict[str, Any] = {"input_ids": [[1], [2], [3]], "output": "token_embeddings", "dtype": "float16"}
    assert answer == told(tiny_clients.http, "gpt", offset=2, encoding="float", **fields)


def test_bad_open_message_leaves_stream_unchanged(tiny_clients: Clients) -> None:
    messages: list[tuple[dict[str, Any], str]] = [
        ({"open": {"rows": -1}}, "rows: got -1, expected a number of rows"),
        ({"open": {"offset": 3}}, "offset is both in the query and in the open message; send it in one of them"),
        ({"open": {"nope": 1}}, "unknown field nope"),
        ({"open": []}, "open: got [], expected a JSON object"),
        ({"open": {}, "step": 1}, "unknown field step"),
    ]
    with stream_of(tiny_clients, "gpt?offset=5") as stream:
        for fields, detail in messages:
            assert as_text(stream, **fields).detail.startswith(detail)
        assert tell(stream, open={"rows": 2})["next_offset"] == [5, 5]


def test_pipelined_messages_are_answered_in_order(tiny_clients: Clients) -> None:
    with stream_of(tiny_clients, "gpt") as stream:
        for _ in range(500):
            stream.send(json.dumps({"input_ids": [1, 2]}))
            stream.send(json.dumps({"rewind": 0}))
        offsets = [json.loads(stream.recv())["next_offset"] for _ in range(1000)]
    assert offsets == [[2], [0]] * 500


def test_successful_operations_are_counted(counted_clients: Clients) -> None:
    def counts() -> dict[str, float]:
        name = "preblock_stream_operations_total", "gpt"
        return {labels[2]: value for labels, value in read_metrics(counted_clients.http).items() if labels[:2] == name}

    with stream_of(counted_clients, "gpt") as stream:
        as_text(stream, input_ids=[1])
        as_text(stream, rewind=[0])
        before = counts()
        as_text(stream, input_ids=[1])
        as_text(stream, input_ids=[7])
        as_frame(stream, rewind=[0])
        after = counts()
    assert (after["step"] - before["step"], after["rewind"] - before["rewind"]) == (1, 1)
