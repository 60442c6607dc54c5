"""Bodies of arrays, with their other fields in the query. Oracle: numpy's own .npy files."""

import io
import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.api.http.routes.embed_calls import JSON, NPY, embed, npy, post_npy
from tests.support.protocols import Clients, native_bytes


@pytest.mark.parametrize(
    "dtype", ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", ">i8", ">i4"]
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_any_integer_dtype_and_order_is_accepted(tiny_clients: Clients, dtype: str, order: Any) -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    response = post_npy(tiny_clients.http, np.array(rows, dtype, order=order))
    assert (
        np.load(io.BytesIO(response.content)).tobytes()
        == native_bytes(tiny_clients, "gpt", {"input_ids": rows}).tobytes()
    )


def test_one_dimensional_npy_is_one_row(tiny_http: httpx.Client) -> None:
    assert post_npy(tiny_http, np.array([1, 2, 3])).headers["Preblock-Shape"] == "1,3,4"


def test_query_shape_beside_npy_is_rejected(tiny_http: httpx.Client) -> None:
    response = post_npy(tiny_http, np.array([1, 2, 3, 4]), shape="2,2")
    assert response.status_code == 422
    assert response.json()["detail"] == "shape: got 2,2, expected nothing, because a .npy file states its shape"


def test_npy_version_2_is_accepted(tiny_http: httpx.Client) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([[1, 2]]), version=(2, 0))
    response = tiny_http.post("/models/gpt/embed", content=stream.getvalue(), headers={"Content-Type": NPY})
    assert response.json() == embed(tiny_http, "gpt", input_ids=[[1, 2]])


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": 3},
        {"offset": [1, 2]},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "encoding": "float"},
        {"token_type_ids": [[0, 1], [1, 0]]},
        {"attention_mask": [[0, 1], [1, 1]]},
        {"position_ids": [[7, 1], [0, 0]]},
    ],
)
def test_npy_request_takes_other_fields_from_query(tiny_http: httpx.Client, fields: dict[str, Any]) -> None:
    query = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    response = tiny_http.post(
        "/models/bert/embed", content=npy(np.array([[1, 2], [3, 4]])), params=query, headers={"Content-Type": NPY}
    )
    assert response.json() == embed(tiny_http, "bert", input_ids=[[1, 2], [3, 4]], **fields)


def test_json_request_takes_other_fields_from_query(tiny_http: httpx.Client) -> None:
    response = tiny_http.post("/models/gpt/embed?offset=3&encoding=float", json={"input_ids": [1]})
    assert response.json() == embed(tiny_http, "gpt", input_ids=[1], offset=3, encoding="float")


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("offset=1&offset=2", "the query has 2 values of offset; send one"),
        ("offset=x", "offset: got x, expected JSON"),
        ("offset=", "offset: got , expected JSON"),
        ("nope=1", "unknown field nope; expected input_ids, "),
        ("input_ids=[1]", "input_ids is both in the query and in the body; send it in one of them"),
    ],
)
@pytest.mark.parametrize("kind", [JSON, NPY])
def test_bad_query_is_rejected(tiny_http: httpx.Client, query: str, detail: str, kind: str) -> None:
    body = npy(np.array([1])) if kind == NPY else b'{"input_ids": [1]}'
    response = tiny_http.post(f"/models/gpt/embed?{query}", content=body, headers={"Content-Type": kind})
    assert response.status_code in (400, 422)
    assert response.json()["detail"].startswith(detail)
