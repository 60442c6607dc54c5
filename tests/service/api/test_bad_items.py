"""Errors about lists name all bad items, in every protocol. The model gpt has 7 ids and 6 positions."""

import json
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from preblock.client import Client
from preblock.client.errors import ServiceError
from tests.service.api.http.routes.v2_calls import declared, infer_binary, raw, tensor, texts
from tests.support.decode_protocols import open_stream
from tests.support.open_inference import infer_message
from tests.support.protocols import Clients
from tests.support.servers import Server

BAD = [3, 40, 99]


def rows(good: Any, *bad: Any) -> list[Any]:
    """Return 100 rows, of which those of `BAD` differ."""
    found = [good] * 100
    for row, value in zip(BAD, bad, strict=True):
        found[row] = value
    return found


IDS = rows([1, 2], *[[7, 2]] * 3)
LAYERS = rows([1], [7], [1] * 7, [-1] * 9)
"""Rows with an id beyond the table, too many tokens, and both."""
TYPES = rows([1], [], 5, [1, "2"])
TEXTS = rows("a b", "", None, 7)
LONG = rows("a ", *["a " * 60] * 3)
POOLED = {"pooling": "last"}


def infer(given: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": [given]}


def test_error_names_all_bad_items(tiny_http: httpx.Client) -> None:
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("models/gpt/embed", {"input_ids": IDS}, "input_ids[3][0]"),
        ("models/gpt/embed", {"input_ids": LAYERS}, "input_ids[3][0]"),
        ("models/gpt/embed", {"input_ids": TYPES}, "input_ids[3]"),
        ("models/gpt/embed", {"parts": [[{"input_ids": row}] for row in TYPES]}, "parts[3][0].input_ids"),
        ("models/bert/embed", {"text": TEXTS}, "text[3]"),
        ("models/bert/embed", {"text": LONG}, "offset[3] + tokens"),
        ("v1/embeddings", POOLED | {"model": "gpt", "input": LAYERS}, "input[3][0]"),
        ("v1/embeddings", POOLED | {"model": "gpt", "input": TYPES}, "input[3]"),
        ("v1/embeddings", POOLED | {"model": "bert", "input": LONG}, "input[3] has 62 tokens"),
        ("v2/models/gpt/infer", infer(tensor("input_ids", IDS)), "input_ids[3][0]"),
        ("v2/models/gpt/infer", infer(tensor("input_ids", rows(1, *[0.5] * 3), shape=[100, 1])), "input_ids.data[3]"),
        ("v2/models/bert/infer", infer(texts(TEXTS, shape=[100])), "text[3]"),
    ]
    for path, body, field in requests:
        document = tiny_http.post(f"/{path}", json=body).json()
        error = document if isinstance(document.get("error"), str | None) else document["error"]
        assert (error["bad_indices"], error["bad_count"]) == (BAD, 3), (path, field)
        assert field in json.dumps(document)
        assert "; 3 bad items: 3, 40, 99" in json.dumps(document)


def test_more_than_100_bad_items_are_counted(tiny_server: Server) -> None:
    with (
        Client(tiny_server.address) as client,
        pytest.raises(ServiceError, match=r"150 bad items: .*, 99, …$") as refused,
    ):
        client.embed(np.full((150, 1), 7), model="gpt")
    error = refused.value
    assert (error.field, error.bad_indices, error.bad_count) == ("input_ids[0][0]", [*range(100)], 150)


def test_flat_list_has_indices_of_values(tiny_http: httpx.Client) -> None:
    mixed = {"input_ids": [[1, 2]], "attention_mask": [0, 2]}
    for fields, field, bad in (({"input_ids": [7, 1, 9]}, "input_ids[0]", [0, 2]), (mixed, "attention_mask[1]", [1])):
        error = tiny_http.post("/models/gpt/embed", json=fields).json()
        assert (error["field"], error["bad_indices"], error["bad_count"]) == (field, bad, len(bad))


def test_binary_and_grpc_errors_name_all_bad_items(tiny_clients: Clients) -> None:
    assert infer_binary(tiny_clients.http, infer(declared(IDS)), raw(IDS)).json()["bad_indices"] == BAD
    with pytest.raises(grpc.RpcError) as refused:
        tiny_clients.stub.ModelInfer(infer_message(IDS))
    metadata = dict(refused.value.trailing_metadata())
    assert (json.loads(metadata["bad-indices"]), metadata["bad-count"]) == (BAD, "3")


def test_stream_errors_name_all_bad_rows(tiny_clients: Clients) -> None:
    steps: list[tuple[dict[str, Any], list[int]]] = [
        ({"input_ids": [[7], [], [1] * 7, [1]]}, [0, 2]),
        ({"input_ids": [["x"], [], [1], 5]}, [0, 3]),
        ({"drop": [4, 0, 9]}, [0, 2]),
        ({"rewind": [0, 1, 0, -1]}, [1, 3]),
    ]
    with open_stream(tiny_clients, "gpt", {"offset": "[0,0,0,0]"}) as stream:
        for step, bad in steps:
            stream.send(json.dumps(step))
            error = json.loads(stream.recv())["error"]
            assert (error["bad_indices"], error["bad_count"]) == (bad, len(bad)), error


def test_client_names_all_rows_that_are_no_integers(tiny_server: Server) -> None:
    with (
        Client(tiny_server.address) as client,
        client.decode("gpt", rows=4) as stream,
        pytest.raises(ServiceError, match=r"input_ids\[1\]: got") as refused,
    ):
        stream.step([[1], [0.5], [2], ["x"]])  # type: ignore[arg-type]
    assert (refused.value.bad_indices, refused.value.bad_count) == ([1, 3], 2)
