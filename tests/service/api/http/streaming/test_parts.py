"""Rows made of parts in decode streams. Oracles: NumPy over answers to ids and the raw tables, one native request."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.sync.client import connect

from tests.support.artifacts import read_tables
from tests.support.servers import Server

EVENTS = {"Accept": "text/event-stream"}
Vectors = NDArray[np.float32]
GIVEN = np.random.default_rng(0).standard_normal((5, 4), np.float32)


@pytest.fixture(scope="module")
def tokens_and_positions(catalogue_repository: Path) -> tuple[Vectors, Vectors]:
    """The raw tables of `gpt`, (V, 4) and (M, 4)."""
    tables = read_tables(catalogue_repository / "gpt" / "1")
    return tables["tokens"], tables["positions"]


def vectors(values: Vectors) -> dict[str, str]:
    return {"vectors": base64.b64encode(values.tobytes()).decode()}


def ids(*values: int) -> dict[str, list[int]]:
    return {"input_ids": [*values]}


def exchange(server: Server, path: str, *messages: dict[str, Any]) -> list[Any]:
    """Return the answers to messages of a WebSocket."""
    answers = []
    with connect(f"{server.address.replace('http', 'ws')}/models/{path}", max_size=None) as stream:
        for message in messages:
            stream.send(json.dumps(message))
            answers.append(json.loads(stream.recv()))
    return answers


def decoded(answer: Any) -> Vectors:
    return np.frombuffer(base64.b64decode(answer["embeddings"]), "<f4").reshape(-1, answer["shape"][-1])


def test_parts_and_ids_take_turns_in_a_stream(
    catalogue_server: Server, tokens_and_positions: tuple[Vectors, Vectors]
) -> None:
    tokens, positions = tokens_and_positions
    first, state, second = exchange(
        catalogue_server,
        "gpt/decode?offset=[1,0]",
        {"parts": [[ids(1), vectors(GIVEN[:2])], [vectors(GIVEN[2:3])]]},
        {"input_ids": [[2], []]},
        {"parts": [[], [ids(3, 4), vectors(GIVEN[3:])]], "offset": [5, 1]},
    )
    row = np.concatenate([tokens[[1]], GIVEN[:2]]) + positions[1:4]
    assert decoded(first).tobytes() == np.concatenate([row, GIVEN[2:3] + positions[:1]]).tobytes()
    assert (first["lengths"], first["next_offset"]) == ([3, 1], [4, 1])
    assert decoded(state).tobytes() == (tokens[[2]] + positions[[4]]).tobytes()
    assert decoded(second).tobytes() == (np.concatenate([tokens[[3, 4]], GIVEN[3:]]) + positions[1:5]).tobytes()
    assert (second["lengths"], second["next_offset"]) == ([0, 4], [5, 5])


def test_placeholder_takes_vectors_in_a_step(catalogue_server: Server) -> None:
    step = {"parts": [ids(1, 99, 99)], "placeholder": {"token_id": 99, **vectors(GIVEN[:2])}}
    (found,) = exchange(catalogue_server, "llama/decode", step)
    alone = httpx.post(f"{catalogue_server.address}/models/llama/embed", json={"input_ids": [1]}).json()
    assert decoded(found).tobytes() == np.concatenate([decoded(alone), GIVEN[:2]]).tobytes()


def test_repeated_step_of_parts_has_the_same_answer(catalogue_server: Server) -> None:
    step = {"parts": [vectors(GIVEN[:2])], "step": 1}
    first, again, other = exchange(
        catalogue_server, "gpt/decode", step, step, {"parts": [vectors(GIVEN[1:3])], "step": 1}
    )
    assert first == again
    assert first["next_offset"] == [2]
    assert other["error"]["title"] == "Conflict"


def test_parts_of_ids_feed_the_history(catalogue_server: Server) -> None:
    query = "ngrams/decode?output=ngram_embeddings"
    first = exchange(catalogue_server, query, {"parts": [ids(5), ids(6)]}, {"parts": [ids(7)]})
    second = exchange(catalogue_server, query, {"input_ids": [5, 6]}, {"input_ids": [7]})
    assert first == second


def test_lines_may_have_parts(catalogue_server: Server) -> None:
    lines = [{"parts": [vectors(GIVEN[:2])]}, {"parts": [[ids(1)]]}, {"input_ids": [2]}]
    answer = httpx.post(
        f"{catalogue_server.address}/models/gpt/decode",
        content="".join(json.dumps(line) + "\n" for line in lines),
        headers={"Content-Type": "application/x-ndjson"},
    )
    found = [decoded(json.loads(line)) for line in answer.text.splitlines()]
    parts = [vectors(GIVEN[:2]), ids(1, 2)]
    whole = httpx.post(f"{catalogue_server.address}/models/gpt/embed", json={"parts": parts}).json()
    assert np.concatenate(found).tobytes() == decoded(whole).tobytes()


@pytest.mark.parametrize("chunk", [1, 2, 3, 9])
def test_events_cut_rows_of_parts_into_chunks(catalogue_server: Server, chunk: int) -> None:
    rows = [[ids(1), vectors(GIVEN[:3]), ids(2)], [vectors(GIVEN[3:]), ids(99)]]
    rest = {"placeholder": {"token_id": 99, **vectors(GIVEN[1:2])}}
    answer = httpx.post(
        f"{catalogue_server.address}/models/gpt/decode", json={"parts": rows, "chunk": chunk, **rest}, headers=EVENTS
    )
    assert answer.status_code == 200, answer.text
    *events, end = (json.loads(event.partition("data: ")[2]) for event in answer.text.split("\n\n")[:-1])
    found: list[list[Vectors]] = [[], []]
    for event in events:
        lengths = event.get("lengths") or [event["shape"][1]] * 2
        for row, part in enumerate(np.split(decoded(event), np.cumsum(lengths)[:-1])):
            found[row].append(part)
    whole = httpx.post(f"{catalogue_server.address}/models/gpt/embed", json={"parts": rows, **rest}).json()
    assert np.concatenate([*found[0], *found[1]]).tobytes() == decoded(whole).tobytes()
    assert end["next_offset"] == [5, 3]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"parts": []}, "parts"),
    ({"parts": [[], []]}, "parts"),
    ({"parts": [[ids(1)], [ids(1)], []]}, "parts"),
    ({"parts": [ids(1)]}, "parts"),
    ({"parts": [[ids(7)], []]}, "input_ids[0][0]"),
    ({"parts": [[], [{"vectors": "AAAA"}]]}, "parts[1][0].vectors"),
    ({"parts": [[ids(1)], []], "attention_mask": [[1], []]}, "attention_mask"),
    ({"parts": [[ids(1)], []], "input_ids": [[1], []]}, "input_ids"),
    ({"parts": [[ids(1)], []], "nope": 1}, "field"),
    ({"parts": [[ids(1)], []], "offset": 3}, "offset[0]"),
    ({"parts": [[], [ids(1), vectors(np.zeros((6, 4), np.float32))]]}, "offset[1] + tokens"),
    ({"placeholder": {"token_id": 1, **vectors(GIVEN)}}, "placeholder"),
    ({"parts": [[{"soft_prompt": "a"}], []]}, "parts[0][0].soft_prompt"),
]


def test_bad_parts_leave_the_stream_unchanged(catalogue_server: Server) -> None:
    *errors, state = exchange(catalogue_server, "gpt/decode?rows=2", *(bad for bad, _ in BAD), {"ping": True})
    assert [error["error"]["field"] for error in errors] == [field for _, field in BAD]
    assert state == {"next_offset": [0, 0]}


def test_output_that_needs_ids_is_rejected(catalogue_server: Server) -> None:
    query = "ngrams/decode?output=ngram_embeddings"
    (answer,) = exchange(catalogue_server, query, {"parts": [vectors(GIVEN)]})
    assert answer["error"]["detail"].startswith("output ngram_embeddings of this model cannot be computed from given")
    answer = httpx.post(
        f"{catalogue_server.address}/models/bert/decode", json={"parts": [vectors(GIVEN)]}, headers=EVENTS
    )
    assert (answer.status_code, answer.json()["field"]) == (422, "output")


def test_events_of_more_rows_than_offsets_are_rejected(catalogue_server: Server) -> None:
    body = {"parts": [[ids(1)], [ids(2)]], "rows": 1}
    answer = httpx.post(f"{catalogue_server.address}/models/gpt/decode", json=body, headers=EVENTS)
    assert (answer.status_code, answer.json()["field"]) == (422, "parts")
