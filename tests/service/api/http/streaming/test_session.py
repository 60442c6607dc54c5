"""Decode streams on a real server, in JSON and in frames. Oracle: a native request."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets import ConnectionClosed, InvalidStatus

from preblock.service.api.http.streaming import DecodeSession
from preblock.service.core.large_bodies import LARGE_BODY_BYTES, MAX_LARGEST_BODIES
from tests.service.api.http.native_requests import BYTES, ask, told
from tests.service.api.http.streaming.frames import Ask, StreamAnswer, as_frame, as_text, head, step, stream_of, tell
from tests.support.decode_protocols import FRAME
from tests.support.engines import open_engine
from tests.support.protocols import ERROR, STEP, Clients, native_bytes
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
    def counts() -> list[float]:
        metrics = read_metrics(counted_clients.http)
        return [metrics.get(("preblock_stream_operations_total", "gpt", name), 0) for name in ("step", "rewind")]

    with stream_of(counted_clients, "gpt") as stream:
        before = counts()
        as_text(stream, input_ids=[1])
        as_text(stream, input_ids=[7])
        as_frame(stream, rewind=[0])
    assert np.subtract(counts(), before).tolist() == [1, 1]


@pytest.mark.parametrize("model", ["gpt2-small", "minilm", "transformer-base"])
def test_decode_steps_equal_one_call_bit_for_bit(model_clients: Clients, model: str) -> None:
    ids = np.random.default_rng(0).integers(0, 30000, 30)
    expected = native_bytes(model_clients, model, {"input_ids": ids.tolist()}).tobytes()
    for kinds in ([as_text], [as_frame], [as_text, as_frame]):
        with stream_of(model_clients, model) as stream:
            parts = [
                kinds[number % len(kinds)](stream, input_ids=[part.tolist()]).tensors[0]
                for number, part in enumerate(np.split(ids, [1, 2, 7, 8, 28]))
            ]
        assert np.concatenate(parts).tobytes() == expected


def test_query_selects_offset_dtype_and_version(tiny_clients: Clients) -> None:
    fields: dict[str, Any] = {"input_ids": [1, 2], "offset": 2}
    for dtype, code in (("float32", 1), ("float16", 2), ("bfloat16", 3)):
        content = ask(tiny_clients.http, "gpt", BYTES, **fields, dtype=dtype).content
        with stream_of(tiny_clients, f"gpt?dtype={dtype}&offset=[2]") as stream:
            answer = tell(stream, input_ids=[1, 2])
            assert answer == told(tiny_clients.http, "gpt", **fields, dtype=dtype)
            tell(stream, rewind=2)
            stream.send(step([[1, 2]]))
            frame: Any = stream.recv()
        assert (frame[20], frame[FRAME.size + 16 :]) == (code, content)
    for version in (1, 2):
        with stream_of(tiny_clients, f"bert/versions/{version}") as stream:
            assert tell(stream, input_ids=[1])["version"] == version


BAD_TEXT = [
    ("", "body: not valid JSON"),
    ("[1]", "body: got a JSON list"),
    ("[" * 100_000, "body: not valid JSON (depth limit exceeded"),
    ("{}", "input_ids: got None"),
    ('{"input_ids": [[]]}', "input_ids[0]: got an empty row"),
    ('{"input_ids": [[1], [2]]}', "input_ids: got 2 rows"),
    ('{"input_ids": [1], "offset": [1, 1]}', "offset: got 2 values"),
    ('{"input_ids": [1], "offset": 2}', "offset[0]: got 2"),
    ('{"input_ids": [1], "text": "a"}', "unknown field text"),
    ('{"input_ids": [1], "ping": true}', "unknown field input_ids"),
    ('{"input_ids": [1], "step": 4294967296}', "step: got 4294967296"),
    ('{"rewind": [0, 0]}', "rewind: got 2 values"),
    ('{"rewind": [9223372036854775808]}', "rewind[0]: got 9223372036854775808"),
    ('{"reorder": 0}', "reorder: got 0"),
    ('{"append": [7]}', "append: got 7"),
    (f'{{"append": {[0] * 2**16}}}', "append: got 65537 rows"),
    ('{"ping": 1}', "ping: got 1"),
    ('{"open": {}}', "an open message must be the first message of its stream"),
    ('{"input_ids": [1], "token_type_ids": [0]}', "token_type_ids is not an input: this model has no segments"),
    ('{"input_ids": [0, 0, 0, 0, 0, 0]}', "offset[0] + tokens: got 1 + 6 = 7"),
]
BAD_FRAMES = [
    (step([[1]], 77, version=1), "frame: got magic b'PRBK', version 1"),
    (head(STEP, number=77), "input_ids: got 0 rows"),
    (step([[-1]], 77), "input_ids[0][0]: got -1"),
    (step([[0] * 6], 77), "offset[0] + tokens: got 1 + 6 = 7"),
]


def test_bad_message_leaves_decode_stream_usable(tiny_clients: Clients) -> None:
    both = native_bytes(tiny_clients, "gpt", {"input_ids": [3, 5]}).tobytes()
    with stream_of(tiny_clients, "gpt") as stream:
        first = as_text(stream, input_ids=[[3]])
        for text, detail in BAD_TEXT:
            stream.send(text)
            error = json.loads(stream.recv())
            assert list(error) == ["error"], text
            assert error["error"]["detail"].startswith(detail), text
            assert error["error"]["status"] in (400, 409, 413, 422)
        for frame, detail in BAD_FRAMES:
            stream.send(frame)
            answer: Any = stream.recv()
            assert answer[: FRAME.size] == head(ERROR, number=77)
            assert json.loads(answer[FRAME.size :])["detail"].startswith(detail), frame
        second = as_frame(stream, input_ids=[[5]])
    assert np.concatenate([*first.tensors, *second.tensors]).tobytes() == both


def test_bad_decode_handshake_is_rejected(tiny_clients: Clients) -> None:
    requests = [
        ("nope?", 404, "model: got nope"),
        ("gpt?offset=7", 422, "offset: got 7"),
        ("gpt?offset=9223372036854775807", 422, "offset: got 9223372036854775807"),
        ("gpt?offset=1.0", 422, "offset: got 1.0"),
        ("gpt?offset=[0,7]", 422, "offset[1]: got 7"),
        ("gpt?rows=-1", 422, "rows: got -1"),
        ("gpt?offset=[0,1]&rows=3", 422, "offset: got 2 values"),
        ("gpt?rows=1000000000000", 413, "rows: got 1000000000000 rows"),
        ("gpt?output=rotary_cos", 422, "output: got rotary_cos"),
        ("gpt?offset=x", 400, "offset: got x"),
        ("gpt?dtype=int8", 422, "dtype: got int8"),
    ]
    for path, status, detail in requests:
        with pytest.raises(InvalidStatus) as refused:
            stream_of(tiny_clients, path)
        response = refused.value.response
        assert response.status_code == status, path
        assert response.headers["Content-Type"] == "application/problem+json"
        assert json.loads(response.body or b"")["detail"].startswith(detail), path


SMALL_TEXT, SMALL_FRAME = b'{"input_ids": [1, 2]}', step([[]])
SETTINGS: dict[str, Any] = {"max_body_bytes": LARGE_BODY_BYTES, "queue_timeout_seconds": 0.05}


@pytest.mark.parametrize("kind", ["text", "frame"])
def test_only_large_decode_message_waits_for_memory(kind: str, tiny_repository: Path) -> None:
    async def scenario() -> tuple[bytes, bytes, bytes]:
        with open_engine(tiny_repository, **SETTINGS) as engine:
            session = DecodeSession(engine, engine.repository.get("gpt"), {})
            answer = session.answer_text if kind == "text" else session.answer_frame
            small = SMALL_TEXT if kind == "text" else SMALL_FRAME
            large = small.ljust(LARGE_BODY_BYTES) if kind == "text" else small + bytes(LARGE_BODY_BYTES)
            held = await engine.limits.bodies.reserve(MAX_LARGEST_BODIES * LARGE_BODY_BYTES)
            answers = await answer(small), await answer(large)
            engine.limits.bodies.release(held)
            return *answers, await answer(large)

    small, waited, after = asyncio.run(scenario())
    message = b"The body waited 0.05 s for other large request bodies. Retry later."
    assert message not in small
    assert message in waited
    assert message not in after
    if kind == "text":
        assert (json.loads(waited)["error"]["status"], json.loads(waited)["error"]["retry_after"]) == (503, 1)
        assert json.loads(after)["next_offset"] == [4]
