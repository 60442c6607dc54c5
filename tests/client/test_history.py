"""Requests and decode streams with the ids before each row, over every protocol. Oracle: one run of onnxruntime."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from websockets.sync.client import connect as connect_socket

import preblock
from preblock.client import errors
from preblock.client.sync_client import Client
from preblock.service.runtime.session import Session
from tests.client.conftest import Connect
from tests.client.flaky_proxy import FlakyProxy
from tests.clients.test_tritonclient import client_of
from tests.support.servers import Server

END, VALUES = 2, 2 * 64
OUTPUT = "ngram_embeddings"
IDS = [11, 12, END, 13, 14, 15, 16, 17, END, END, 18, 19]
"""Ids with ends of sequence."""


@pytest.fixture(scope="module")
def session(kinds_repository: Path) -> Session:
    return Session(kinds_repository / "ngrams/1", graph="ngrams.onnx")


def run(session: Session, ids: list[int], context: tuple[int, int] = (END, END)) -> NDArray[np.float32]:
    """Return the vectors (L, N * E) of one row."""
    feeds = {"input_ids": np.array([ids]), "context": np.array([context])}
    return session.run(feeds)[OUTPUT].reshape(len(ids), VALUES)


def test_answers_continue_with_the_context_of_the_last(kinds_client: Client, session: Session) -> None:
    assert [kinds_client.model(name).history for name in ("ngrams", "gpt")] == [2, 0]
    expected, offset, context = run(session, IDS), None, None
    for begin, end in ((0, 1), (1, 5), (5, 12)):
        ids: Any = np.array([IDS[begin:end]]) if begin else [IDS[begin:end]]  # safetensors and JSON
        answer = kinds_client.embed(ids, model="ngrams", output=OUTPUT, offset=offset, context=context)
        assert answer.vectors.reshape(-1, VALUES).tobytes() == expected[begin:end].tobytes()
        assert answer.use_as == "n-gram embeddings of some layers"
        offset, context = answer.next_offset, answer.next_context
    assert context is not None
    assert context.tolist() == [IDS[-2:]]
    assert kinds_client.embed([IDS], model="ngrams").next_context is None


def test_headers_and_query_carry_contexts(kinds_server: Server, session: Session) -> None:
    url = f"{kinds_server.address}/models/ngrams/embed?output={OUTPUT}&offset=[4,7]&context=[[1,2],[3,4]]&shape=2,2"
    headers = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
    for _ in range(2):  # the second would come from a template, if there were one
        response = httpx.post(url, content=np.array([[5, 6], [7, 8]], "<i8").tobytes(), headers=headers)
        expected = np.concatenate((run(session, [5, 6], (1, 2)), run(session, [7, 8], (3, 4))))
        assert response.content == expected.tobytes()
        assert response.headers["Preblock-Next-Context"] == "5,6,7,8"
        assert response.headers["Preblock-Next-Offset"] == "6,9"


def test_bad_contexts_are_refused(kinds_server: Server) -> None:
    for model, context, detail in (
        ("ngrams", [1, 2, 3], "context: got 3 ids, expected 2 ids"),
        ("ngrams", [[1, 2], [3, 4]], "context: got 2 rows, expected 1 rows"),
        ("ngrams", [[1, 99]], "context[0][1]: got 99, expected 0 to 98"),
        ("ngrams", [[1, "a"]], "context[0][1]: got 'a', expected a 64-bit integer"),
        ("ngrams", 5, "context: got 5, expected a list of integers"),
        ("gpt", [1, 2], "context is not an input"),
    ):
        body = {"input_ids": [5], "output": "embeddings" if model == "gpt" else OUTPUT, "context": context}
        response = httpx.post(f"{kinds_server.address}/models/{model}/embed", json=body)
        assert (response.status_code, response.json()["detail"][: len(detail)]) == (422, detail)


TENSORS = {"input_ids": [[5, 6, 7], [8, END, 9]], "offset": [4], "context": [[1, 2], [3, 4]]}


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_open_inference_protocol_takes_and_returns_contexts(
    kinds_server: Server, session: Session, module: Any
) -> None:
    client = client_of(module, kinds_server)

    def infer(tensors: dict[str, Any], *outputs: str, **options: Any) -> Any:
        requested = [module.InferRequestedOutput(name) for name in outputs]
        return client.infer("ngrams", client.inputs(**tensors), outputs=requested, **options)

    inputs = client.document("get_model_metadata", "ngrams")["inputs"]
    assert {"name": "context", "datatype": "INT64", "shape": [-1, 2]} in inputs
    answer = infer(TENSORS, OUTPUT, "next_context")
    expected = [run(session, [5, 6, 7], (1, 2)), run(session, [8, END, 9], (3, 4))]
    assert answer.as_numpy(OUTPUT).tobytes() == np.concatenate(expected).tobytes()
    assert answer.as_numpy("next_context").tolist() == [[6, 7], [END, 9]]
    with pytest.raises(Exception, match="next_context needs an n-gram output"):
        infer(TENSORS, "embeddings", "next_context")
    found = []
    for begin, end in ((0, 1), (1, 5), (5, 12)):  # a sequence keeps the context
        options: dict[str, Any] = {"sequence_id": 7, "sequence_start": begin == 0, "sequence_end": end == 12}
        found.append(infer({"input_ids": [IDS[begin:end]]}, OUTPUT, **options).as_numpy(OUTPUT))
    assert np.concatenate(found, axis=1).tobytes() == run(session, IDS).tobytes()
    infer(TENSORS, OUTPUT, sequence_id=8, sequence_start=True)
    with pytest.raises(Exception, match="context: got a value, expected nothing, since the sequence keeps it"):
        infer({name: TENSORS[name] for name in ("input_ids", "context")}, OUTPUT, sequence_id=8)


def test_stream_equals_one_call_token_by_token(connect: Connect, kinds_server: Server, session: Session) -> None:
    """Also over a new connection."""
    with (
        FlakyProxy(kinds_server.address) as proxy,
        connect(proxy.address).decode("ngrams", output=OUTPUT, resume=True) as stream,
    ):
        assert stream.context == [[END, END]]
        found = [stream.step(IDS[:5])]
        proxy.break_all()
        found += [stream.step([id_]) for id_ in IDS[5:]]
        assert stream.context == [IDS[-2:]]
    assert np.concatenate(found, axis=1).tobytes() == run(session, IDS).tobytes()


@pytest.mark.parametrize("companions", [[], ["embeddings"]])
def test_rows_keep_their_history_through_every_operation(
    companions: list[str], kinds_client: Client, session: Session
) -> None:
    def check(vectors: Any, *rows: tuple[list[int], int]) -> None:
        """Compare the vectors of the last tokens of each row: its ids so far, and how many of them are new."""
        expected = [run(session, ids)[-new:] for ids, new in rows if new]
        assert np.asarray(vectors).tobytes() == np.concatenate(expected).tobytes()

    first, second = [21, 22, 23, 24], [31, END, 33, 34]
    with kinds_client.decode("ngrams", output=OUTPUT, rows=2, companions=companions) as stream:
        check(stream.step([first, second[:1]]), (first, 4), (second[:1], 1))
        check(stream.step([[], second[1:]]), (first, 0), (second, 3))
        stream.rewind([1, 3])
        check(stream.step([[40], [41]]), ([21, 40], 1), ([31, END, 33, 41], 1))
        stream.reorder([1, 0, 0])
        check(stream.step([[50], [51], [52]]), ([33, 41, 50], 1), ([21, 40, 51], 1), ([21, 40, 52], 1))
        stream.ping()
        stream.drop([0])
        stream.append([0])
        check(stream.step([[], [], [60]]), ([], 0), ([], 0), ([60], 1))
        stream.rewind([0, 1, 0])
        check(stream.step([[70], [71], [72]]), ([70], 1), ([21, 71], 1), ([72], 1))
        stream.append([5], context=[[8, 9]])
        found = stream.step([[], [], [], [80, 81]])
        assert found.tobytes() == run(session, [80, 81], (8, 9)).tobytes()
        assert [stream.companions[name].shape for name in companions] == [(2, 4)] * len(companions)
        masked = stream.step([[1, 90], [91, 1], [1, 92], [93, 1]], attention_mask=[[0, 1], [1, 0], [0, 1], [1, 0]])
        for row, (place, ids) in enumerate(((1, [70, 90]), (0, [21, 71, 91]), (1, [72, 92]))):
            assert masked[row, place].tobytes() == run(session, ids)[-1].tobytes()
        assert stream.context == [[70, 90], [71, 91], [72, 92], [81, 93]]


def test_rewind_knows_no_ids_before_the_stream(kinds_client: Client) -> None:
    with kinds_client.decode("ngrams", output=OUTPUT, offset=5, context=[[8, 9]]) as stream:
        stream.step([10, 11])
        with pytest.raises(errors.RequestError, match=r"rewind\[0\]: got 4, expected 5 to 7, or 0: the ids before are"):
            stream.rewind(4)
        assert (stream.offset, stream.context) == ([7], [[10, 11]])
        stream.rewind(6)
        assert stream.context == [[9, 10]]
        with pytest.raises(errors.RequestError, match="context: got nothing, expected the last 2 ids before each row"):
            stream.append([3])
        stream.step([12], position_ids=[20])
        with pytest.raises(errors.RequestError, match=r"rewind\[0\]: got 20, expected 21 to 21, or 0"):
            stream.rewind(20)
        stream.rewind(0)
        assert stream.context == [[END, END]]


def test_new_row_at_later_position_needs_a_context(kinds_client: Client, session: Session) -> None:
    message = "context: got nothing, expected the last 2 ids before each row, since row {} begins at {}"
    refused = pytest.raises(errors.RequestError, match=message.format(0, 5))
    with refused, kinds_client.decode("ngrams", output=OUTPUT, offset=5):
        pass
    with kinds_client.decode("ngrams", output=OUTPUT, rows=2) as stream:
        with pytest.raises(errors.RequestError, match=message.format(0, 7)):
            stream.step([[5, 6], []], position_ids=[[7, 8], []])
        stream.step([[5], []])
        with pytest.raises(errors.RequestError, match=message.format(1, 7)):
            stream.step([[6], [1, 5]], position_ids=[[9], [0, 7]], attention_mask=[[1], [0, 1]])
        assert stream.context == [[END, 5], [END, END]]
        found = stream.step([[6], [7, 8]], position_ids=[[9], [0, 3]])
        assert found.tobytes() == run(session, [5, 6])[1:].tobytes() + run(session, [7, 8]).tobytes()
        stream.rewind([0, 0])
        with pytest.raises(errors.RequestError, match=message.format(0, 7)):
            stream.step([[5], [6]], position_ids=[[7], [0]])
        for positions in ([[-1], [0]], [[7], [0, 1]], [[2**62], [0]]):
            with pytest.raises(errors.RequestError, match=r"^position_ids"):
                stream.step([[5], [6]], position_ids=positions)
    with kinds_client.decode("ngrams", output=OUTPUT, context=[[8, 9]]) as stream:
        assert stream.step([5, 6], position_ids=[7, 8]).tobytes() == run(session, [5, 6], (8, 9)).tobytes()


def test_stream_without_history_resumes_without_context(kinds_server: Server) -> None:
    with (
        FlakyProxy(kinds_server.address) as proxy,
        preblock.connect(proxy.address) as client,
        client.decode("ngrams", offset=2, context=[[8, 9]], resume=True) as stream,
    ):
        assert stream.context is None
        stream.append([3])
        proxy.break_all()
        assert stream.step([[1], [2]]).shape[:2] == (2, 1)
        assert stream.offset == [3, 4]


def test_json_messages_hold_contexts(kinds_server: Server, session: Session) -> None:
    with connect_socket(f"{kinds_server.socket}/models/ngrams/decode") as stream:

        def send(**message: Any) -> dict[str, Any]:
            stream.send(json.dumps(message))
            answer: dict[str, Any] = json.loads(stream.recv())
            return answer

        opening = {"output": [OUTPUT], "encoding": "float", "offset": [4], "context": [[1, 2]]}
        assert send(open=opening)["next_context"] == [[1, 2]]
        answer = send(input_ids=[5, 6, 7], step=1)
        assert answer["next_context"] == [[6, 7]]
        assert send(input_ids=[5, 6, 7], step=1) == answer  # a repeated message sees the history before it
        assert send(append=[4], context=[[1, 2]], step=2) == {
            "next_offset": [7, 4],
            "next_context": [[6, 7], [1, 2]],
            "step": 2,
        }
        assert send(rewind=[6, 4])["next_context"] == [[5, 6], [1, 2]]
        found = np.array(send(input_ids=[[8], [9]])[OUTPUT], np.float32).reshape(2, -1)
        expected = (run(session, [5, 6, 8], (1, 2))[-1], run(session, [9], (1, 2))[0])
        assert found.tobytes() == np.stack(expected).tobytes()
        assert "context" in send(append=[4], context=[[1]])["error"]["detail"]
        assert "context" in send(rewind=[4, 4], context=[[1, 2]])["error"]["detail"]
        assert send(close=True) == {"closing": "close", "next_offset": [7, 5], "next_context": [[6, 8], [2, 9]]}


def test_events_and_lines_hold_contexts(kinds_server: Server, session: Session) -> None:
    url = f"{kinds_server.address}/models/ngrams/decode"
    body = {"input_ids": IDS, "chunk": 5, "output": OUTPUT, "encoding": "float", "offset": 3, "context": [[1, 2]]}
    events = httpx.post(url, json=body, headers={"Accept": "text/event-stream"}).text.split("\n\n")
    answers = [json.loads(line[6:]) for event in events for line in event.splitlines() if line.startswith("data: ")]
    found = np.concatenate([np.array(answer[OUTPUT], np.float32)[0] for answer in answers[:3]])
    assert found.tobytes() == run(session, IDS, (1, 2)).tobytes()
    assert [answer["next_context"] for answer in answers] == [[[13, 14]], [[END, END]], [[18, 19]], [[18, 19]]]
    lines = "\n".join(json.dumps({"input_ids": [id_]}) for id_ in IDS)
    headers = {"Content-Type": "application/x-ndjson"}
    response = httpx.post(f"{url}?output={OUTPUT}&encoding=float", content=lines, headers=headers)
    found = np.concatenate([np.array(json.loads(line)[OUTPUT], np.float32)[0] for line in response.text.splitlines()])
    assert found.tobytes() == run(session, IDS).tobytes()
