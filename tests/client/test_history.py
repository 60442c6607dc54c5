"""N-gram embeddings with history over every protocol of a real server. Oracle: the graph, over whole rows at once."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from numpy.typing import NDArray
from websockets.sync.client import connect

import preblock
from preblock.client import errors
from preblock.client.sync_client import Client
from preblock.service.runtime.session import Session
from tests.client.flaky_proxy import FlakyProxy
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, serve

END, VALUES = 2, 2 * 64
OUTPUT = "ngram_embeddings"
IDS = [11, 12, END, 13, 14, 15, 16, 17, END, END, 18, 19]
OTHERS = [[21, 22, 23, 24], [31, END, 33, 34]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ngrams")
    copy_artifact("ngrams", root)
    copy_artifact("gpt", root)
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(folder) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with preblock.connect(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def session(folder: Path) -> Session:
    return Session(folder / "ngrams/1", graph="ngrams.onnx")


def whole(session: Session, ids: list[int], context: tuple[int, int] = (END, END)) -> NDArray[np.float32]:
    """Return the vectors (L, N * E) of one row."""
    feeds = {"input_ids": np.array([ids]), "context": np.array([context])}
    return session.run(feeds)[OUTPUT].reshape(len(ids), VALUES)


def test_answers_continue_with_the_context_of_the_last(client: Client, session: Session) -> None:
    assert client.model("ngrams").history == 2
    assert client.model("gpt").history == 0
    expected, offset, context = whole(session, IDS), None, None
    for begin, end in ((0, 1), (1, 5), (5, 12)):
        ids: Any = np.array([IDS[begin:end]]) if begin else [IDS[begin:end]]  # safetensors and JSON
        answer = client.embed(ids, model="ngrams", output=OUTPUT, offset=offset, context=context)
        assert answer.vectors.reshape(-1, VALUES).tobytes() == expected[begin:end].tobytes()
        assert answer.use_as == "n-gram embeddings of some layers"
        offset, context = answer.next_offset, answer.next_context
    assert context is not None
    assert context.tolist() == [IDS[-2:]]
    assert client.embed([IDS], model="ngrams").next_context is None


def test_headers_and_query_carry_contexts(server: Server, session: Session) -> None:
    url = f"{server.address}/models/ngrams/embed?output={OUTPUT}&offset=[4,7]&context=[[1,2],[3,4]]&shape=2,2"
    headers = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
    for _ in range(2):  # the second would come from a template, if there were one
        response = httpx.post(url, content=np.array([[5, 6], [7, 8]], "<i8").tobytes(), headers=headers)
        expected = np.concatenate((whole(session, [5, 6], (1, 2)), whole(session, [7, 8], (3, 4))))
        assert response.content == expected.tobytes()
        assert response.headers["Preblock-Next-Context"] == "5,6,7,8"
        assert response.headers["Preblock-Next-Offset"] == "6,9"


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"offset": 3}, "context: got nothing, expected the last 2 ids before each row, since row 0 begins at 3"),
        ({"context": [[1]]}, "context[0]: got 1 ids, expected 2 ids, the last ones before the row"),
        ({"context": [1, 2, 3]}, "context: got 3 ids, expected 2 ids"),
        ({"context": [[1, 2], [3, 4]]}, "context: got 2 rows, expected 1 rows"),
        ({"context": [[1, 99]]}, "context[0][1]: got 99, expected 0 to 98"),
        ({"context": [[1, "a"]]}, "context[0][1]: got 'a', expected a 64-bit integer"),
        ({"context": 5}, "context: got 5, expected a list of integers"),
    ],
)
def test_bad_contexts_are_refused(server: Server, fields: dict[str, Any], detail: str) -> None:
    body = {"input_ids": [5], "output": OUTPUT} | fields
    response = httpx.post(f"{server.address}/models/ngrams/embed", json=body)
    assert response.status_code == 422
    assert response.json()["detail"].startswith(detail)


def test_other_models_take_no_context(server: Server) -> None:
    response = httpx.post(f"{server.address}/models/gpt/embed", json={"input_ids": [5], "context": [1, 2]})
    assert response.status_code == 422
    assert response.json()["detail"].startswith("context is not an input")


def test_open_inference_protocol_over_http(server: Server, session: Session) -> None:
    triton = triton_http.InferenceServerClient(server.address.removeprefix("http://"))
    inputs = [triton_http.InferInput(name, shape, "INT64") for name, shape in INPUTS]
    for tensor, values in zip(inputs, TENSORS, strict=True):
        tensor.set_data_from_numpy(values)
    outputs = [triton_http.InferRequestedOutput(name) for name in (OUTPUT, "next_context")]
    check_infer(triton.infer("ngrams", inputs, outputs=outputs), session)
    assert {"name": "context", "datatype": "INT64", "shape": [-1, 2]} in triton.get_model_metadata("ngrams")["inputs"]
    with pytest.raises(Exception, match="next_context needs the output ngram_embeddings"):
        triton.infer(
            "ngrams", inputs, outputs=[triton_http.InferRequestedOutput(n) for n in ("embeddings", "next_context")]
        )
    with pytest.raises(Exception, match="context: got nothing"):
        triton.infer("ngrams", inputs[:2], outputs=outputs)


def test_open_inference_protocol_over_grpc(server: Server, session: Session) -> None:
    triton = triton_grpc.InferenceServerClient(server.grpc)
    inputs = [triton_grpc.InferInput(name, shape, "INT64") for name, shape in INPUTS]
    for tensor, values in zip(inputs, TENSORS, strict=True):
        tensor.set_data_from_numpy(values)
    outputs = [triton_grpc.InferRequestedOutput(name) for name in (OUTPUT, "next_context")]
    check_infer(triton.infer("ngrams", inputs, outputs=outputs), session)


INPUTS = (("input_ids", [2, 3]), ("offset", [1]), ("context", [2, 2]))
TENSORS = (np.array([[5, 6, 7], [8, END, 9]]), np.array([4]), np.array([[1, 2], [3, 4]]))


def check_infer(result: Any, session: Session) -> None:
    ids, _, context = (values.tolist() for values in TENSORS)
    expected = [whole(session, row, before) for row, before in zip(ids, context, strict=True)]
    assert result.as_numpy(OUTPUT).tobytes() == np.concatenate(expected).tobytes()
    assert result.as_numpy("next_context").tolist() == [[6, 7], [END, 9]]


def test_sequences_keep_the_context(server: Server, session: Session) -> None:
    triton = triton_http.InferenceServerClient(server.address.removeprefix("http://"))
    outputs, found = [triton_http.InferRequestedOutput(OUTPUT)], []
    for begin, end in ((0, 1), (1, 5), (5, 12)):
        tensor = triton_http.InferInput("input_ids", [1, end - begin], "INT64")
        tensor.set_data_from_numpy(np.array([IDS[begin:end]]))
        options: dict[str, Any] = {"sequence_id": 7, "sequence_start": begin == 0, "sequence_end": end == 12}
        found.append(triton.infer("ngrams", [tensor], outputs=outputs, **options).as_numpy(OUTPUT).reshape(-1, VALUES))
    assert np.concatenate(found).tobytes() == whole(session, IDS).tobytes()
    tensors = [triton_http.InferInput(name, shape, "INT64") for name, shape in INPUTS]
    for tensor, values in zip(tensors, TENSORS, strict=True):
        tensor.set_data_from_numpy(values)
    check_begin = triton.infer("ngrams", tensors, outputs=outputs, sequence_id=8, sequence_start=True)
    assert check_begin.as_numpy(OUTPUT).shape == (2, 3, 2, VALUES // 2)
    with pytest.raises(Exception, match="context: got a value, expected nothing, since the sequence keeps it"):
        triton.infer("ngrams", [tensors[0], tensors[2]], outputs=outputs, sequence_id=8)


def test_stream_equals_one_call_token_by_token(client: Client, session: Session) -> None:
    with client.decode("ngrams", output=OUTPUT) as stream:
        assert stream.context == [[END, END]]
        found = [stream.step([id_]) for id_ in IDS]
        assert stream.context == [IDS[-2:]]
    assert np.concatenate(found, axis=1).tobytes() == whole(session, IDS).tobytes()


def test_rows_keep_their_history_through_every_operation(client: Client, session: Session) -> None:
    def check(vectors: Any, *rows: tuple[list[int], int]) -> None:
        """Compare the vectors of the last tokens of each row: its ids so far, and how many of them are new."""
        expected = [whole(session, ids)[-new:] for ids, new in rows if new]
        assert np.asarray(vectors).tobytes() == np.concatenate(expected).tobytes()

    first, second = OTHERS
    with client.decode("ngrams", output=OUTPUT, rows=2, companions=["embeddings"]) as stream:
        check(stream.step([first, second[:1]]), (first, 4), (second[:1], 1))
        check(stream.step([[], second[1:]]), (first, 0), (second, 3))
        stream.rewind([1, 3])
        check(stream.step([[40], [41]]), ([*first[:1], 40], 1), ([*second[:3], 41], 1))
        stream.reorder([1, 0, 0])
        check(
            stream.step([[50], [51], [52]]),
            *(
                ([*row, new], 1)
                for row, new in zip(([*second[:3], 41], [*first[:1], 40], [*first[:1], 40]), (50, 51, 52), strict=True)
            ),
        )
        stream.ping()
        stream.drop([0])
        stream.append([0])
        check(stream.step([[], [], [60]]), ([], 0), ([], 0), ([60], 1))
        stream.rewind([0, 1, 0])
        check(stream.step([[70], [71], [72]]), ([70], 1), ([*first[:1], 71], 1), ([72], 1))
        stream.append([5], context=[[8, 9]])
        found = stream.step([[], [], [], [80, 81]])
        assert found.tobytes() == whole(session, [80, 81], (8, 9)).tobytes()
        assert stream.companions["embeddings"].shape == (2, 4)
        masked = stream.step([[1, 90], [91, 1], [1, 92], [93, 1]], attention_mask=[[0, 1], [1, 0], [0, 1], [1, 0]])
        rows = [[70, 90], [*first[:1], 71, 91], [72, 92]]
        for row, (place, ids) in enumerate(zip((1, 0, 1), rows, strict=True)):
            assert masked[row, place].tobytes() == whole(session, ids)[-1].tobytes()
        assert stream.context == [[70, 90], [71, 91], [72, 92], [81, 93]]


def test_rewind_knows_no_ids_before_the_stream(client: Client) -> None:
    with client.decode("ngrams", output=OUTPUT, offset=5, context=[[8, 9]]) as stream:
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


def test_stream_needs_a_context_to_start_at_an_offset(client: Client) -> None:
    with (
        pytest.raises(errors.RequestError, match="context: got nothing"),
        client.decode("ngrams", output=OUTPUT, offset=5),
    ):
        pass
    with client.decode("ngrams", offset=5) as stream:  # other outputs need none
        stream.step([1])
        assert stream.context is None


def test_stream_resumes_with_its_history(server: Server, session: Session) -> None:
    with (
        FlakyProxy(server.address) as proxy,
        preblock.connect(proxy.address) as client,
        client.decode("ngrams", output=OUTPUT, resume=True) as stream,
    ):
        found = [stream.step(IDS[:5])]
        proxy.break_all()
        found += [stream.step([id_]) for id_ in IDS[5:]]
    assert np.concatenate(found, axis=1).tobytes() == whole(session, IDS).tobytes()


def test_stream_without_history_resumes_without_context(server: Server) -> None:
    with (
        FlakyProxy(server.address) as proxy,
        preblock.connect(proxy.address) as client,
        client.decode("ngrams", offset=2, context=[[8, 9]], resume=True) as stream,
    ):
        stream.append([3])
        proxy.break_all()
        assert stream.step([[1], [2]]).shape[:2] == (2, 1)
        assert stream.offset == [3, 4]


def test_json_messages_hold_contexts(server: Server, session: Session) -> None:
    with connect(f"{server.socket}/models/ngrams/decode?output={OUTPUT}&encoding=float") as stream:

        def send(**message: Any) -> dict[str, Any]:
            stream.send(json.dumps(message))
            answer: dict[str, Any] = json.loads(stream.recv())
            return answer

        answer = send(input_ids=[5, 6, 7], step=1)
        assert answer["next_context"] == [[6, 7]]
        assert send(input_ids=[5, 6, 7], step=1) == answer  # a repeated message sees the history before it
        assert send(append=[4], context=[[1, 2]], step=2) == {
            "next_offset": [3, 4],
            "next_context": [[6, 7], [1, 2]],
            "step": 2,
        }
        assert send(rewind=[2, 4])["next_context"] == [[5, 6], [1, 2]]
        found = np.array(send(input_ids=[[8], [9]])[OUTPUT], np.float32).reshape(2, -1)
        expected = (whole(session, [5, 6, 8])[-1], whole(session, [9], (1, 2))[0])
        assert found.tobytes() == np.stack(expected).tobytes()
        assert "context" in send(append=[4], context=[[1]])["error"]["detail"]
        assert "context" in send(rewind=[0, 0], context=[[1, 2]])["error"]["detail"]
        assert send(close=True) == {"closing": "close", "next_offset": [3, 5], "next_context": [[6, 8], [2, 9]]}


def test_opened_stream_states_its_contexts(server: Server) -> None:
    with connect(f"{server.socket}/models/ngrams/decode") as stream:
        stream.send(json.dumps({"open": {"output": [OUTPUT], "offset": [4], "context": [[1, 2]]}}))
        assert json.loads(stream.recv())["next_context"] == [[1, 2]]


def test_events_and_lines_hold_contexts(server: Server, session: Session) -> None:
    url = f"{server.address}/models/ngrams/decode"
    body = {"input_ids": IDS, "chunk": 5, "output": OUTPUT, "encoding": "float", "offset": 3, "context": [[1, 2]]}
    events = httpx.post(url, json=body, headers={"Accept": "text/event-stream"}).text.split("\n\n")
    answers = [json.loads(line[6:]) for event in events for line in event.splitlines() if line.startswith("data: ")]
    found = np.concatenate([np.array(answer[OUTPUT], np.float32)[0] for answer in answers[:3]])
    assert found.tobytes() == whole(session, IDS, (1, 2)).tobytes()
    assert [answer["next_context"] for answer in answers] == [[[13, 14]], [[END, END]], [[18, 19]], [[18, 19]]]
    lines = "\n".join(json.dumps({"input_ids": [id_]}) for id_ in IDS)
    headers = {"Content-Type": "application/x-ndjson"}
    response = httpx.post(f"{url}?output={OUTPUT}&encoding=float", content=lines, headers=headers)
    found = np.concatenate([np.array(json.loads(line)[OUTPUT], np.float32)[0] for line in response.text.splitlines()])
    assert found.tobytes() == whole(session, IDS).tobytes()


def test_frames_of_version_1_hold_no_context(server: Server) -> None:
    with connect(f"{server.socket}/models/ngrams/decode?output={OUTPUT}") as stream:
        header = b"PRBK\x01\x01\0\0" + (0).to_bytes(4, "little") + (1).to_bytes(4, "little") * 2 + bytes(4)
        stream.send(header + (5).to_bytes(8, "little") + (1).to_bytes(4, "little"))
        answer = stream.recv()
        assert b"version: got 1, expected 2, since ngram_embeddings depend on earlier ids" in answer
