"""Rows made of parts in decode streams. Oracles: NumPy over answers to ids and the raw tables, one native request."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.api.http.native_requests import Vectors, encode, told, vectors_of
from tests.service.api.http.streaming.frames import stream_of, tell
from tests.support.artifacts import read_tables
from tests.support.protocols import Clients

EVENTS = {"Accept": "text/event-stream"}
GIVEN = np.random.default_rng(0).standard_normal((5, 4), np.float32)


def vectors(values: Vectors) -> dict[str, str]:
    return {"vectors": encode(values)}


def ids(*values: int) -> dict[str, list[int]]:
    return {"input_ids": [*values]}


def exchange(clients: Clients, path: str, *messages: dict[str, Any]) -> list[Any]:
    """Return the answers to messages of a WebSocket."""
    with stream_of(clients, path) as stream:
        return [tell(stream, **message) for message in messages]


def decoded(answer: Any) -> Vectors:
    return vectors_of(answer).reshape(-1, answer["shape"][-1])


def test_parts_and_ids_take_turns_in_a_stream(catalogue_clients: Clients, catalogue_repository: Path) -> None:
    tables = read_tables(catalogue_repository / "gpt" / "1")
    tokens, positions = tables["tokens"], tables["positions"]
    first, state, second = exchange(
        catalogue_clients,
        "gpt?offset=[1,0]",
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


def test_placeholder_takes_vectors_in_a_step(catalogue_clients: Clients) -> None:
    step = {"parts": [ids(1, 99, 99)], "placeholder": {"token_id": 99, **vectors(GIVEN[:2])}}
    (found,) = exchange(catalogue_clients, "llama", step)
    alone = told(catalogue_clients.http, "llama", input_ids=[1])
    assert decoded(found).tobytes() == np.concatenate([decoded(alone), GIVEN[:2]]).tobytes()


def test_repeated_step_of_parts_has_the_same_answer(catalogue_clients: Clients) -> None:
    step, changed = ({"parts": [vectors(values)], "step": 1} for values in (GIVEN[:2], GIVEN[1:3]))
    first, again, other = exchange(catalogue_clients, "gpt", step, step, changed)
    assert first == again
    assert (first["next_offset"], other["error"]["title"]) == ([2], "Conflict")


@pytest.mark.parametrize("chunk", [1, 2, 3, 9])
def test_events_cut_rows_of_parts_into_chunks(catalogue_http: httpx.Client, chunk: int) -> None:
    fields: dict[str, Any] = {"parts": [[ids(1), vectors(GIVEN[:3]), ids(2)], [vectors(GIVEN[3:]), ids(99)]]}
    fields["placeholder"] = {"token_id": 99, **vectors(GIVEN[1:2])}
    answer = catalogue_http.post("/models/gpt/decode", json=fields | {"chunk": chunk}, headers=EVENTS)
    *events, end = (json.loads(event.partition("data: ")[2]) for event in answer.text.split("\n\n")[:-1])
    found: list[list[Vectors]] = [[], []]
    for event in events:
        lengths = event.get("lengths") or [event["shape"][1]] * 2
        for row, part in enumerate(np.split(decoded(event), np.cumsum(lengths)[:-1])):
            found[row].append(part)
    whole = told(catalogue_http, "gpt", **fields)
    assert np.concatenate([*found[0], *found[1]]).tobytes() == decoded(whole).tobytes()
    assert end["next_offset"] == [5, 3]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"parts": [[], []]}, "parts"),
    ({"parts": [[ids(1)], [ids(1)], []]}, "parts"),
    ({"parts": [ids(1)]}, "parts"),
    ({"parts": [[ids(7)], []]}, "input_ids[0][0]"),
    ({"parts": [[ids(1)], []], "attention_mask": [[1], []]}, "attention_mask"),
    ({"parts": [[ids(1)], []], "offset": 3}, "offset[0]"),
    ({"parts": [[], [ids(1), vectors(np.zeros((6, 4), np.float32))]]}, "offset[1] + tokens"),
    ({"placeholder": {"token_id": 1, **vectors(GIVEN)}}, "placeholder"),
]


def test_bad_parts_are_rejected(catalogue_clients: Clients) -> None:
    *errors, state = exchange(catalogue_clients, "gpt?rows=2", *(bad for bad, _ in BAD), {"ping": True})
    assert [error["error"]["field"] for error in errors] == [field for _, field in BAD]
    assert state == {"next_offset": [0, 0]}
    (answer,) = exchange(catalogue_clients, "ngrams?output=ngram_embeddings", {"parts": [vectors(GIVEN)]})
    assert answer["error"]["field"] == "output"
    events: list[tuple[str, dict[str, Any], str]] = [
        ("bert", {"parts": [vectors(GIVEN)]}, "output"),
        ("gpt", {"parts": [[ids(1)], [ids(2)]], "rows": 1}, "parts"),
    ]
    for model, fields, field in events:
        refused = catalogue_clients.http.post(f"/models/{model}/decode", json=fields, headers=EVENTS)
        assert (refused.status_code, refused.json()["field"]) == (422, field)
