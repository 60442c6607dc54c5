"""Every kind of error, as the clients raise it, and arguments that they refuse themselves."""

import json
import pickle
from collections import UserString
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preblock.client import errors
from preblock.service.api.http.errors import STATUS, problem
from preblock.service.core import errors as service
from tests.client.conftest import Connect, raises_kind
from tests.client.flaky_proxy import FlakyProxy, canned
from tests.support.late import torch
from tests.support.servers import Server


def test_problem_response_becomes_error_of_its_kind() -> None:
    for kind, status in STATUS.items():
        body = problem(kind("input_ids[0]", 9, "0 to 8"))
        error = errors.of_problem(status, body)
        assert error.kind == kind.__name__
        assert isinstance(error, errors.RequestError) == issubclass(kind, service.ClientFault)
        assert (error.field, error.got, error.expected, error.status) == ("input_ids[0]", "9", "0 to 8", status)
        assert error.problem == json.loads(body)
        assert str(error) == "input_ids[0]: got 9, expected 0 to 8"
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (502, b'{"status": "error", "message": "bad"}', "status 502", 'status 502: {"status": "error", "message": "'),
        (503, b'{"status": null}', "Unavailable", 'status 503: {"status": null}'),
        (401, b'{"error": {"code": 401}}', "Unauthenticated", 'status 401: {"error": {"code": 401}}'),
        (201, b'{"status": 404, "detail": "x"}', "status 201", "x"),
        (404, b'{"status": 404, "error": "Not Found"}', "NotFound", "Not Found"),
        (502, b'{"message": "' + b"x" * 1000, "status 502", 'status 502: {"message": "xxx'),
        (502, b"[" * 100_000, "status 502", "status 502: [[["),
    ],
    ids=range(7),
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


@pytest.mark.parametrize(
    ("ids", "options", "kind", "field"),
    [
        ([[1, 2], [3, -1]], {}, "Invalid", "input_ids[1][1]"),
        ([1, 2.5], {}, "Invalid", "input_ids[1]"),
        ([], {}, "Invalid", "input_ids"),
        ("text", {}, "Invalid", "input_ids"),
        ([[1, 2]] * 40000, {}, "TooLarge", "input_ids"),
        ([1], {"indices": {"word": [1]}}, "Invalid", "field"),
        ([1], {"indices": {"offset": 1}}, "Invalid", "indices"),
        ([1], {"indices": {"token_type_ids": [1]}, "token_type_ids": [1]}, "Invalid", "indices"),
        ([1], {"indices": [1]}, "Invalid", "indices"),
        ([1], {"indices": {1: [1]}}, "Invalid", "indices"),
        ([1], {"indices": {"word": None}}, "Invalid", "indices"),
        ([1], {"indices": {"step": [1]}}, "Invalid", "indices"),
        ([1], {"dtype": np.float16}, "Invalid", "dtype"),
        ([1], {"output": "rotary_cos"}, "Invalid", "output"),
        ([1], {"output": ["embeddings"]}, "Invalid", "output"),
        ([1], {"output": "embeddings,token_embeddings"}, "Invalid", "output"),
        ([1], {"model": None}, "Invalid", "model"),
        ([1], {"model": "none"}, "NotFound", "model"),
        ([1], {"model": "../gpt"}, "Invalid", "model"),
        ([1], {"model": ""}, "Invalid", "model"),
        ([1], {"model": ".."}, "Invalid", "model"),
        ([1], {"version": 7}, "NotFound", "version"),
        ([1], {"offset": float("nan")}, "Malformed", "body"),
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
    assert raised.value.field == field


def test_names_of_other_calls_are_checked(tiny_client: Any) -> None:
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("model", lambda: tiny_client.load(None)),
        ("model", lambda: tiny_client.ready("a/b")),
        ("text", lambda: tiny_client.text(b"abc", model="gpt")),
        ("dtype", lambda: tiny_client.bias(1, 1, model="gpt", dtype=np.float16)),
        ("dtype", lambda: tiny_client.embed([1], model="gpt", dtype=torch.float16)),
        ("input_ids", lambda: tiny_client.prompt_embeds(model="bert")),
        ("input_ids", lambda: tiny_client.prompt_embeds([1], text="a", model="bert")),
    ]
    for field, call in calls:
        with raises_kind("Invalid") as raised:
            call()
        assert raised.value.field == field


def test_rows_without_plain_integers_are_rejected(tiny_client: Any) -> None:
    for rows, got in (
        (np.ma.array([[1, 2]], mask=[[False, True]]), "a masked array"),
        (torch.tensor([[1, 2]]).bfloat16(), "a torch.strided tensor of torch.bfloat16 ("),
        (torch.tensor([[1, 2]]).to_sparse(), "a torch.sparse_coo tensor of torch.int64 ("),
    ):
        for field in ("input_ids", "attention_mask", "position_ids"):
            given: dict[str, Any] = {"ids": [[1, 2]]} | {"ids" if field == "input_ids" else field: rows}
            with raises_kind("Invalid") as raised:
                tiny_client.embed(model="gpt", **given)
            with tiny_client.decode("gpt") as stream, raises_kind("Invalid") as streamed:
                stream.step(**given)
            for error in (raised.value, streamed.value):
                assert error.field == field
                assert error.got.startswith(got)


@pytest.mark.parametrize(
    ("url", "got"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("ftp://host", "ftp://host"),
        ("http://", "http://"),
        ("http://host:port", "http://host:port"),
        ("", "nothing"),
        ("http://a:65536", "http://a:65536"),
        ("http://a/?b", "http://a/?b"),
        ("http://a#b", "http://a#b"),
        (f"http://{'a' * 64}.example", f"http://{'a' * 64}.example"),
        ("http+unix://a", "http+unix://a"),
        (None, "None"),
        (b"http://a", "b'http://a'"),
        ([None], "None"),
        ([], "no address"),
        (["http://a", "https://b"], "addresses with http:// and with https://"),
        (["http+unix://%2Fa", "http://b"], "several addresses, one with http+unix://"),
        (["http://a", "b"], "b"),
    ],
    ids=str,
)
def test_unusable_address_is_rejected(connect: Connect, url: Any, got: str) -> None:
    with raises_kind("Invalid") as raised:
        connect(url)
    assert (raised.value.field, raised.value.got) == ("url", got)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("timeout", ["30", 0, -1, float("nan"), float("inf"), 1e10, 10**400]),
        ("retries", ["3", 1.5, -1, None]),
        ("key", ["", "ä", "a\n"]),
    ],
)
def test_unusable_option_is_rejected(connect: Connect, option: str, values: list[Any]) -> None:
    for value in values:
        with raises_kind("Invalid") as raised:
            connect("http://a", **{option: value})
        assert raised.value.field == option, value


@pytest.mark.parametrize("timeout", [np.int64(60), 9e9, None])
def test_timeout_of_any_number_is_kept(connect: Connect, tiny_server: Server, timeout: Any) -> None:
    client = connect(tiny_server.address, timeout=timeout)
    assert client.embed([1], model="gpt").vectors.shape == (1, 1, 4)


def test_client_keeps_path_of_address(connect: Connect, tiny_server: Server) -> None:
    with pytest.raises(errors.RequestError, match=r"GET /under/models"):
        connect(f"{tiny_server.address}/under/").models()
