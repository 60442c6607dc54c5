"""Errors about lists name all bad items, in every protocol. The model gpt has 7 ids and 6 positions."""

import json
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from websockets.sync.client import connect

from preblock.client import Client
from preblock.client.errors import ServiceError
from tests.support.open_inference import infer_message, open_stub
from tests.support.servers import Server

BAD = [3, 40, 99]
IDS = [[7 if row in BAD else 1, 2] for row in range(100)]
LAYERS = [[7] if row == 3 else [1] * 7 if row == 40 else [-1] * 9 if row == 99 else [1] for row in range(100)]
"""Rows with an id beyond the table, too many tokens, and both."""
TYPES = [[] if row == 3 else 5 if row == 40 else [1, "2"] if row == 99 else [1] for row in range(100)]
TEXTS = ["" if row == 3 else None if row == 40 else 7 if row == 99 else "a b" for row in range(100)]
BLANK = ["  " if row in BAD else "a" for row in range(100)]
LONG = ["a " * (60 if row in BAD else 1) for row in range(100)]


def tensor(name: str, datatype: str, values: Any, *shape: int) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": values}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("models/gpt/embed", {"input_ids": IDS}, "input_ids[3][0]"),
        ("models/gpt/embed", {"input_ids": LAYERS}, "input_ids[3][0]"),
        ("models/gpt/embed", {"input_ids": TYPES}, "input_ids[3]"),
        ("models/gpt/embed", {"parts": [[{"input_ids": row}] for row in TYPES]}, "parts[3][0].input_ids"),
        ("models/bert/embed", {"text": TEXTS}, "text[3]"),
        ("models/bert/embed", {"text": LONG}, "offset[3] + tokens"),
        ("models/bert/embed", {"text": BLANK, "special_tokens": False}, "text[3]"),
        ("v1/embeddings", {"model": "gpt", "pooling": "last", "input": LAYERS}, "input[3][0]"),
        ("v1/embeddings", {"model": "bert", "pooling": "last", "input": LONG}, "input[3] has 62 tokens"),
        ("v1/embeddings", {"model": "gpt", "pooling": "last", "input": [*TYPES[1:], []]}, "input[2]"),
        ("v1/embeddings", {"model": "bert", "pooling": "last", "input": ["a", *TEXTS[1:]]}, "input[3]"),
        ("v2/models/gpt/infer", tensor("input_ids", "INT64", IDS, 100, 2), "input_ids[3][0]"),
        ("v2/models/gpt/infer", tensor("input_ids", "INT64", [1] * 199 + [0.5], 100, 2), "input_ids.data[199]"),
        ("v2/models/bert/infer", tensor("text", "BYTES", TEXTS, 100), "text[3]"),
    ],
)
def test_error_names_all_bad_items(tiny_http: httpx.Client, path: str, body: Any, field: str) -> None:
    answer = tiny_http.post(f"/{path}", json=body)
    document = answer.json()
    error = document if isinstance(document.get("error"), str | None) else document["error"]
    bad = BAD
    if "input[2]" in field:
        bad = [2, 39, 98, 99]
    elif "data[199]" in field:
        bad = [99]
    assert (error["bad_indices"], error["bad_count"]) == (bad, len(bad)), answer.text
    text = json.dumps(document)
    assert field in text
    assert len(bad) == 1 or f"; {len(bad)} bad items: {', '.join(map(str, bad))}" in text


def test_more_than_100_bad_items_are_counted(tiny_server: Server) -> None:
    with (
        Client(tiny_server.address) as client,
        pytest.raises(ServiceError, match=r"150 bad items: .*, 99, …$") as refused,
    ):
        client.embed(np.full((150, 1), 7), model="gpt")
    error = refused.value
    assert (error.field, error.bad_indices, error.bad_count) == ("input_ids[0][0]", [*range(100)], 150)


def test_flat_list_has_indices_of_values(tiny_http: httpx.Client) -> None:
    error = tiny_http.post("/models/gpt/embed", json={"input_ids": [7, 1, 9]}).json()
    assert (error["field"], error["bad_indices"], error["bad_count"]) == ("input_ids[0]", [0, 2], 2)
    mixed = {"input_ids": [[1, 2]], "attention_mask": [0, 2]}
    error = tiny_http.post("/models/gpt/embed", json=mixed).json()
    assert (error["field"], error["bad_indices"], error["bad_count"]) == ("attention_mask[1]", [1], 1)


def test_binary_and_grpc_errors_name_all_bad_items(tiny_server: Server, tiny_http: httpx.Client) -> None:
    header = {"name": "input_ids", "datatype": "INT64", "shape": [100, 2], "parameters": {"binary_data_size": 1600}}
    head, content = json.dumps({"inputs": [header]}).encode(), np.array(IDS).tobytes()
    answer = tiny_http.post(
        "/v2/models/gpt/infer", content=head + content, headers={"Inference-Header-Content-Length": str(len(head))}
    )
    assert answer.json()["bad_indices"] == BAD
    with open_stub(tiny_server.grpc) as stub, pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(infer_message(IDS))
    metadata = dict(refused.value.trailing_metadata())
    assert (json.loads(metadata["bad-indices"]), metadata["bad-count"]) == (BAD, "3")


@pytest.mark.parametrize(
    ("step", "bad"),
    [
        ({"input_ids": [[7], [], [1] * 7, [1]]}, [0, 2]),
        ({"input_ids": [["x"], [], [1], 5]}, [0, 3]),
        ({"drop": [4, 0, 9]}, [0, 2]),
        ({"rewind": [0, 1, 0, -1]}, [1, 3]),
    ],
)
def test_stream_errors_name_all_bad_rows(tiny_server: Server, step: Any, bad: list[int]) -> None:
    address = tiny_server.address.replace("http", "ws", 1)
    with connect(f"{address}/models/gpt/decode?rows=4") as stream:
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
