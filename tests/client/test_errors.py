"""Every kind of error, as the clients raise it."""

import json
import pickle
from collections import UserString
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

import preblock
from preblock.client import errors
from preblock.service.api.http.errors import STATUS, problem
from preblock.service.core import errors as service
from tests.client.conftest import Connect, raises_kind
from tests.client.flaky_proxy import FlakyProxy, canned
from tests.support.late import torch
from tests.support.servers import Server


@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
def test_problem_response_becomes_error_of_its_kind(kind: type[service.PreblockError]) -> None:
    body = problem(kind("input_ids[0]", 9, "0 to 8"))
    error = errors.of_problem(STATUS[kind], body)
    assert error.kind == kind.__name__
    assert isinstance(error, errors.RequestError) == issubclass(kind, service.ClientFault)
    assert (error.field, error.got, error.expected, error.status) == ("input_ids[0]", "9", "0 to 8", STATUS[kind])
    assert error.problem == json.loads(body)
    assert str(error) == "input_ids[0]: got 9, expected 0 to 8"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (
            502,
            b'{"status": "error", "message": "bad"}',
            "status 502",
            'status 502: {"status": "error", "message": "bad"}',
        ),
        (
            403,
            b'{"kind": "Status", "status": "Failure"}',
            "status 403",
            'status 403: {"kind": "Status", "status": "Failure',
        ),
        (503, b'{"status": null}', "Unavailable", 'status 503: {"status": null}'),
        (403, b'{"message": "Forbidden"}', "status 403", 'status 403: {"message": "Forbidden"}'),
        (401, b'{"error": {"code": 401}}', "Unauthenticated", 'status 401: {"error": {"code": 401}}'),
        (500, b'{"detail": {"a": 1}}', "status 500", 'status 500: {"detail": {"a": 1}}'),
        (201, b'{"status": 404, "detail": "x"}', "status 201", "x"),
        (404, b'{"status": 404, "error": "Not Found"}', "NotFound", "Not Found"),
        (502, b'{"message": "' + b"x" * 1000, "status 502", 'status 502: {"message": "xxx'),
        (502, b"[" * 100_000, "status 502", "status 502: [[["),
    ],
    ids=range(10),
)
def test_response_of_gateway_becomes_error(status: int, body: bytes, kind: str, text: str) -> None:
    error = errors.of_problem(status, body)
    assert (error.status, error.kind, isinstance(error, errors.RequestError)) == (status, kind, 400 <= status < 500)
    assert str(error).startswith(text)
    assert len(str(error)) < 250


def test_answer_without_a_header_of_tensors_is_rejected(connect: Connect, flaky: FlakyProxy) -> None:
    flaky.script = [canned("200 OK", (4).to_bytes(8, "little") + b'"ab"')]
    with pytest.raises(errors.ServerError, match=r"^/models/gpt/embed: the answer is not from Preblock \("):
        connect(flaky.address).embed([1], model="gpt")


def test_ready_with_json_of_gateway_is_false(connect: Connect, flaky: FlakyProxy) -> None:
    body = b'{"status": "error", "message": "no server"}'
    flaky.script = [canned("503 Service Unavailable", body), canned("502 Bad Gateway", body)]
    client = connect(flaky.address, retries=1)
    assert client.ready() is False
    assert len(client.models()) == 2
    assert flaky.connections == 3


@pytest.mark.parametrize(
    ("ids", "options", "kind", "field"),
    [
        ([7], {}, "Invalid", "input_ids[0]"),
        ([[1, 2], [3, -1]], {}, "Invalid", "input_ids[1][1]"),
        ([1, 2.5], {}, "Invalid", "input_ids[1]"),
        ([1, True], {}, "Invalid", "input_ids[1]"),
        ([], {}, "Invalid", "input_ids"),
        ("text", {}, "Invalid", "input_ids"),
        ([1], {"offset": 6}, "Invalid", None),
        ([1], {"indices": {"word": [1]}}, "Invalid", "field"),
        ([1], {"indices": {"offset": 1}}, "Invalid", "indices"),
        ([1], {"indices": {"token_type_ids": [1]}, "token_type_ids": [1]}, "Invalid", "indices"),
        ([1], {"indices": [1]}, "Invalid", "indices"),
        ([1], {"indices": {1: [1]}}, "Invalid", "indices"),
        ([1], {"indices": {"word": None}}, "Invalid", "indices"),
        ([1], {"indices": {"step": [1]}}, "Invalid", "indices"),
        ([1], {"dtype": "float64"}, "Invalid", "dtype"),
        ([1], {"dtype": np.float16}, "Invalid", "dtype"),
        ([1], {"output": "rotary_cos"}, "Invalid", "output"),
        ([1], {"output": ["embeddings"]}, "Invalid", "output"),
        ([1], {"output": "embeddings,token_embeddings"}, "Invalid", "output"),
        ([1], {"model": None}, "Invalid", "model"),
        ([1], {"offset": float("nan")}, "Malformed", "body"),
        ([[1, 2]] * 40000, {}, "TooLarge", None),
        ([1], {"model": "none"}, "NotFound", None),
        ([1], {"model": "../gpt"}, "Invalid", "model"),
        ([1], {"model": "openai-community/gpt2"}, "Invalid", "model"),
        ([1], {"model": ""}, "Invalid", "model"),
        ([1], {"model": ".."}, "Invalid", "model"),
        ([1], {"version": 7}, "NotFound", None),
        ([print], {}, "Invalid", "input_ids"),
        ([1], {"offset": {1}}, "Invalid", "offset"),
        ([1], {"offset": bytearray(b"1")}, "Invalid", "offset"),
        ([1], {"offset": {(1, 2): 3}}, "Invalid", "offset"),
        ([1], {"offset": UserString("1")}, "Invalid", "offset"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_request_raises_request_error(
    tiny_client: Any, ids: Any, options: dict[str, Any], kind: str, field: str
) -> None:
    with raises_kind(kind) as raised:
        tiny_client.embed(ids, **{"model": "gpt"} | options)
    assert isinstance(raised.value, errors.RequestError)
    if field is not None:
        assert raised.value.field == field


def test_dtype_of_torch_is_rejected(tiny_client: Any) -> None:
    with raises_kind("Invalid") as raised:
        tiny_client.embed([1], model="gpt", dtype=torch.float16)
    assert raised.value.field == "dtype"


@pytest.mark.parametrize(
    ("rows", "got"),
    [
        (lambda: np.ma.array([[1, 2]], mask=[[False, True]]), "a masked array"),
        (lambda: torch.tensor([[1, 2]]).bfloat16(), r"a torch.strided tensor of torch.bfloat16 \(.*\)"),
        (lambda: torch.tensor([[1, 2]]).to_sparse(), r"a torch.sparse_coo tensor of torch.int64 \(.*\)"),
    ],
    ids=["masked", "bfloat16", "sparse"],
)
def test_rows_without_plain_integers_are_rejected(tiny_client: Any, rows: Callable[[], Any], got: str) -> None:
    for field in ("input_ids", "attention_mask", "position_ids"):
        given: dict[str, Any] = {"ids": [[1, 2]]} | {"ids" if field == "input_ids" else field: rows()}
        with raises_kind("Invalid", match=f"^{field}: got {got}, expected a") as raised:
            tiny_client.embed(model="gpt", **given)
        assert raised.value.field == field
        with tiny_client.decode("gpt") as stream, raises_kind("Invalid", match=f"^{field}: got {got}, expected a"):
            stream.step(**given)


def test_masked_vectors_of_a_part_are_rejected(tiny_client: Any) -> None:
    vectors = np.ma.array(np.ones((1, 4), np.float32), mask=[[False, False, False, True]])
    with raises_kind("Invalid", match=r"^parts\[0\].vectors: got a masked array, expected an array without "):
        tiny_client.embed(parts=[{"vectors": vectors}], model="gpt")


def test_array_with_unused_mask_is_accepted(tiny_client: Any) -> None:
    unmasked = np.ma.array([[1, 2]])
    assert np.array_equal(
        tiny_client.embed(unmasked, model="gpt").vectors, tiny_client.embed([[1, 2]], model="gpt").vectors
    )


@pytest.mark.parametrize(
    ("header", "media_type", "kind"),
    [("Content-Type", "text/plain", "UnsupportedFormat"), ("Accept", "text/html", "NotAcceptable")],
)
def test_unsupported_media_type_is_rejected(tiny_server: Server, header: str, media_type: str, kind: str) -> None:
    """A caller's own httpx client replaces a header of each request."""

    def replace(request: httpx.Request) -> None:
        request.headers[header] = media_type

    with httpx.Client(event_hooks={"request": [replace]}) as http_client, raises_kind(kind):
        preblock.connect(tiny_server.address, http_client=http_client).embed([1], model="gpt")


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "",
        "http://a:65536",
        "http://a/?b",
        "http://a#b",
        "http://a?",
        f"http://{'a' * 64}.example",
        "http://a..b",
    ],
)
def test_malformed_address_is_rejected(connect: Connect, url: str) -> None:
    with raises_kind("Invalid", match=r"^url: got ") as raised:
        connect(url)
    assert raised.value.field == "url"


@pytest.mark.parametrize("url", [None, 8000, b"http://a", [None]])
def test_address_that_is_no_text_is_rejected(connect: Connect, url: Any) -> None:
    with raises_kind("Invalid", match=r"^url: got .+, expected http://… or https://…$"):
        connect(url)


@pytest.mark.parametrize("timeout", ["30", 0, -1, float("nan"), float("inf"), 1e10, 10**400])
def test_timeout_that_is_no_time_is_rejected(connect: Connect, timeout: Any) -> None:
    with raises_kind("Invalid", match=r"^timeout: got .+, expected seconds, more than 0 and at most [\d.e+]+$"):
        connect("http://a", timeout=timeout)


@pytest.mark.parametrize("retries", ["3", 1.5, -1, None])
def test_retries_that_are_no_number_are_rejected(connect: Connect, retries: Any) -> None:
    with raises_kind("Invalid", match=r"^retries: got .+, expected a whole number from 0 on$"):
        connect("http://a", retries=retries)


@pytest.mark.parametrize("timeout", [np.int64(60), 9e9, None])
def test_timeout_of_any_number_is_kept(connect: Connect, tiny_server: Server, timeout: Any) -> None:
    client = connect(tiny_server.address, timeout=timeout)
    assert client.embed([1], model="gpt").vectors.shape == (1, 1, 4)


def test_empty_key_is_rejected_before_a_request(connect: Connect) -> None:
    with raises_kind("Invalid", match=r"^key: got an empty text, expected a key, or None to send none$"):
        connect("http://a", key="")


@pytest.mark.parametrize(
    ("field", "value"),
    [("output", ["embeddings"]), ("dtype", np.float16), ("companions", "rotary_cos"), ("companions", None)],
)
def test_names_of_a_stream_are_checked(tiny_client: Any, field: str, value: Any) -> None:
    names = rf"^{field}: got .+, expected .+name"
    with raises_kind("Invalid", match=names) as raised, tiny_client.decode("gpt", **{field: value}):
        pass
    assert raised.value.field == field


def test_names_of_other_calls_are_checked(tiny_client: Any) -> None:
    with raises_kind("Invalid", match=r"^model: got None, expected the name of a model, without '/'$"):
        tiny_client.load(None)
    with raises_kind("Invalid", match=r"^model: got 'a/b', expected the name of a model, without '/'$"):
        tiny_client.ready("a/b")
    with raises_kind("Invalid", match=r"^text: got a bytes, expected texts, numbers, and lists"):
        tiny_client.text(b"abc", model="gpt")
    with raises_kind("Invalid", match=r"^dtype: got .+, expected a name such as 'float16'$"):
        tiny_client.bias(1, 1, model="gpt", dtype=np.float16)


def test_stream_accepts_scalars_of_numpy(tiny_client: Any) -> None:
    given = np.ones((1, 4), np.float32)
    placeholder = {"token_id": np.int64(7), "vectors": given}
    parts = [[{"input_ids": [7]}], [{"input_ids": [1]}]]
    with tiny_client.decode("gpt", rows=np.int64(2), output="token_embeddings") as stream:
        vectors = stream.step(parts=parts, placeholder=placeholder)
    assert np.array_equal(vectors[0], given)
    assert np.array_equal(vectors[1], tiny_client.embed([1], model="gpt", output="token_embeddings").vectors[0])


def test_client_keeps_path_of_address(connect: Connect, tiny_server: Server) -> None:
    with pytest.raises(errors.RequestError, match=r"GET /under/models"):
        connect(f"{tiny_server.address}/under/").models()
