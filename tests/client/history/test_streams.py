"""Decode streams with the ids before each row. Oracle: one run of onnxruntime."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.sync.client import connect

import preblock
from preblock.client import errors
from preblock.client.sync_client import Client
from preblock.service.runtime.fused_embedding import BUILT
from preblock.service.runtime.session import Session
from tests.client.flaky_proxy import FlakyProxy
from tests.client.history.rows import END, IDS, OTHERS, OUTPUT, whole
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server, serve


def test_stream_equals_one_call_token_by_token(ngram_client: Client, ngram_session: Session) -> None:
    with ngram_client.decode("ngrams", output=OUTPUT) as stream:
        assert stream.context == [[END, END]]
        found = [stream.step([id_]) for id_ in IDS]
        assert stream.context == [IDS[-2:]]
    assert np.concatenate(found, axis=1).tobytes() == whole(ngram_session, IDS).tobytes()


@pytest.mark.parametrize("companions", [[], ["embeddings"]])
def test_rows_keep_their_history_through_every_operation(
    companions: list[str], ngram_client: Client, ngram_session: Session
) -> None:
    def check(vectors: Any, *rows: tuple[list[int], int]) -> None:
        """Compare the vectors of the last tokens of each row: its ids so far, and how many of them are new."""
        expected = [whole(ngram_session, ids)[-new:] for ids, new in rows if new]
        assert np.asarray(vectors).tobytes() == np.concatenate(expected).tobytes()

    first, second = OTHERS
    with ngram_client.decode("ngrams", output=OUTPUT, rows=2, companions=companions) as stream:
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
        assert found.tobytes() == whole(ngram_session, [80, 81], (8, 9)).tobytes()
        assert [stream.companions[name].shape for name in companions] == [(2, 4)] * len(companions)
        masked = stream.step([[1, 90], [91, 1], [1, 92], [93, 1]], attention_mask=[[0, 1], [1, 0], [0, 1], [1, 0]])
        rows = [[70, 90], [*first[:1], 71, 91], [72, 92]]
        for row, (place, ids) in enumerate(zip((1, 0, 1), rows, strict=True)):
            assert masked[row, place].tobytes() == whole(ngram_session, ids)[-1].tobytes()
        assert stream.context == [[70, 90], [71, 91], [72, 92], [81, 93]]


def test_rewind_knows_no_ids_before_the_stream(ngram_client: Client) -> None:
    with ngram_client.decode("ngrams", output=OUTPUT, offset=5, context=[[8, 9]]) as stream:
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


def test_stream_needs_a_context_to_start_at_an_offset(ngram_client: Client) -> None:
    with (
        pytest.raises(errors.RequestError, match="context: got nothing"),
        ngram_client.decode("ngrams", output=OUTPUT, offset=5),
    ):
        pass
    with ngram_client.decode("ngrams", offset=5) as stream:  # other outputs need none
        stream.step([1])
        assert stream.context is None


def test_new_row_at_later_position_needs_a_context(ngram_client: Client, ngram_session: Session) -> None:
    message = "context: got nothing, expected the last 2 ids before each row, since row {} begins at 7"
    with ngram_client.decode("ngrams", output=OUTPUT, rows=2) as stream:
        with pytest.raises(errors.RequestError, match=message.format(0)):
            stream.step([[5, 6], []], position_ids=[[7, 8], []])
        stream.step([[5], []])
        with pytest.raises(errors.RequestError, match=message.format(1)):
            stream.step([[6], [1, 5]], position_ids=[[9], [0, 7]], attention_mask=[[1], [0, 1]])
        assert stream.context == [[END, 5], [END, END]]
        found = stream.step([[6], [7, 8]], position_ids=[[9], [0, 3]])
        assert found.tobytes() == b"".join(
            (whole(ngram_session, [5, 6])[1:].tobytes(), whole(ngram_session, [7, 8]).tobytes())
        )
        stream.rewind([0, 0])
        with pytest.raises(errors.RequestError, match=message.format(0)):
            stream.step([[5], [6]], position_ids=[[7], [0]])
        for positions in ([[-1], [0]], [[7], [0, 1]], [[2**62], [0]]):
            with pytest.raises(errors.RequestError, match=r"^position_ids"):
                stream.step([[5], [6]], position_ids=positions)
    with ngram_client.decode("ngrams", output=OUTPUT, context=[[8, 9]]) as stream:
        assert stream.step([5, 6], position_ids=[7, 8]).tobytes() == whole(ngram_session, [5, 6], (8, 9)).tobytes()


@pytest.mark.skipif(not BUILT, reason="_stored_rows.c was not built")
def test_step_on_a_broken_table_feeds_nothing(ngram_session: Session, tmp_path: Path) -> None:
    folder = copy_artifact("ngrams", tmp_path)
    with (
        serve(tmp_path) as server,
        preblock.connect(server.address) as client,
        client.decode("ngrams", output=OUTPUT) as stream,
    ):
        assert stream.step([5, 6]).tobytes() == whole(ngram_session, [5, 6]).tobytes()
        os.truncate(folder / "model.onnx.data", 100)
        for _ in range(2):
            with pytest.raises(
                errors.ServerError, match="a table of ngram_embeddings is broken: table: got a file that"
            ):
                stream.step([7])
        assert (stream.offset, stream.context) == ([2], [[5, 6]])
        stream.rewind(1)
        assert stream.context == [[END, 5]]


def test_stream_resumes_with_its_history(ngram_server: Server, ngram_session: Session) -> None:
    with (
        FlakyProxy(ngram_server.address) as proxy,
        preblock.connect(proxy.address) as client,
        client.decode("ngrams", output=OUTPUT, resume=True) as stream,
    ):
        found = [stream.step(IDS[:5])]
        proxy.break_all()
        found += [stream.step([id_]) for id_ in IDS[5:]]
    assert np.concatenate(found, axis=1).tobytes() == whole(ngram_session, IDS).tobytes()


def test_stream_without_history_resumes_without_context(ngram_server: Server) -> None:
    with (
        FlakyProxy(ngram_server.address) as proxy,
        preblock.connect(proxy.address) as client,
        client.decode("ngrams", offset=2, context=[[8, 9]], resume=True) as stream,
    ):
        stream.append([3])
        proxy.break_all()
        assert stream.step([[1], [2]]).shape[:2] == (2, 1)
        assert stream.offset == [3, 4]


def test_json_messages_hold_contexts(ngram_server: Server, ngram_session: Session) -> None:
    with connect(f"{ngram_server.socket}/models/ngrams/decode?output={OUTPUT}&encoding=float") as stream:

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
        expected = (whole(ngram_session, [5, 6, 8])[-1], whole(ngram_session, [9], (1, 2))[0])
        assert found.tobytes() == np.stack(expected).tobytes()
        assert "context" in send(append=[4], context=[[1]])["error"]["detail"]
        assert "context" in send(rewind=[0, 0], context=[[1, 2]])["error"]["detail"]
        assert send(close=True) == {"closing": "close", "next_offset": [3, 5], "next_context": [[6, 8], [2, 9]]}


def test_opened_stream_states_its_contexts(ngram_server: Server) -> None:
    with connect(f"{ngram_server.socket}/models/ngrams/decode") as stream:
        stream.send(json.dumps({"open": {"output": [OUTPUT], "offset": [4], "context": [[1, 2]]}}))
        assert json.loads(stream.recv())["next_context"] == [[1, 2]]


def test_events_and_lines_hold_contexts(ngram_server: Server, ngram_session: Session) -> None:
    url = f"{ngram_server.address}/models/ngrams/decode"
    body = {"input_ids": IDS, "chunk": 5, "output": OUTPUT, "encoding": "float", "offset": 3, "context": [[1, 2]]}
    events = httpx.post(url, json=body, headers={"Accept": "text/event-stream"}).text.split("\n\n")
    answers = [json.loads(line[6:]) for event in events for line in event.splitlines() if line.startswith("data: ")]
    found = np.concatenate([np.array(answer[OUTPUT], np.float32)[0] for answer in answers[:3]])
    assert found.tobytes() == whole(ngram_session, IDS, (1, 2)).tobytes()
    assert [answer["next_context"] for answer in answers] == [[[13, 14]], [[END, END]], [[18, 19]], [[18, 19]]]
    lines = "\n".join(json.dumps({"input_ids": [id_]}) for id_ in IDS)
    headers = {"Content-Type": "application/x-ndjson"}
    response = httpx.post(f"{url}?output={OUTPUT}&encoding=float", content=lines, headers=headers)
    found = np.concatenate([np.array(json.loads(line)[OUTPUT], np.float32)[0] for line in response.text.splitlines()])
    assert found.tobytes() == whole(ngram_session, IDS).tobytes()
