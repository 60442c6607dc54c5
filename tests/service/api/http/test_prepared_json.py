"""JSON requests prepared by an earlier request.

Oracle: the answers to the same bodies with a new header.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from itertools import count
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

import tests.support.profiles  # noqa: F401
from tests.support.servers import Server

BYTES = "application/octet-stream"
NUMBERS = count()


def open_connection(server: Server) -> HTTPConnection:
    url = httpx.URL(server.address)
    return HTTPConnection(url.host, url.port, timeout=60)


@pytest.fixture
def connection(tiny_server: Server) -> Iterator[HTTPConnection]:
    with closing(open_connection(tiny_server)) as connection:
        yield connection


def ask(
    connection: HTTPConnection, body: bytes, accept: str = "application/json", **headers: str
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return status, headers without those of time, and body."""
    types = {"Content-Type": "application/json", "Accept": accept, "X-Request-Id": "mine"}
    connection.request("POST", "/models/gpt/embed", body, types | headers)
    answer = connection.getresponse()
    found = [pair for pair in answer.getheaders() if pair[0] not in ("date", "server-timing")]
    return answer.status, found, answer.read()


def alone(connection: HTTPConnection, body: bytes, accept: str = "application/json") -> tuple[int, Any, bytes]:
    """Return the answer to a request that is not prepared."""
    return ask(connection, body, accept, **{"X-Number": str(next(NUMBERS))})


def document(ids: Any, size: int, **fields: Any) -> bytes:
    """Return a body of `size` bytes; the ids are a document, or JSON text."""
    text = ids if isinstance(ids, str) else json.dumps(ids)
    rest = "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    begin, end = f'{{"input_ids": {text}'.encode(), f"{rest}}}".encode()
    assert len(begin) + len(end) <= size
    return begin + b" " * (size - len(begin) - len(end)) + end


OTHERS = (
    *("[[1, 2]]", "[[ 1,2 ]]", " [[1\n,\t2]]", "[[6, 0]]"),  # allowed ids
    *("[1, 2]", "[[1], [2]]", "[[1, 2], [3, 4]]", "[[1, 2, 3]]", "[[1, 2], [3]]", "[[1]]"),  # of other shapes
    *("[[true, 2]]", "[[1, false]]", "[[1.0, 2]]", "[[1e0, 2]]", '["1", 2]', '[["1", 2]]', "[[null, 2]]", "null", "7"),
    *("[[1, -1]]", "[[1, 7]]", f"[[1, {2**63 - 1}]]", f"[[1, {2**63}]]", f"[[1, {-(2**63) - 1}]]"),
    *("[[[1, 2]]]", "[]", "[[]]", "[[], []]", "[[1, 2],]", "[[1, 2,]]", "[[1 2]]", "[[1, 2]", "[1, 2]]", "[[01, 2]]"),
    *('[[1, 2]], "offset": 3', '[[1, 2]], "pooling": "mean"', '[[1, 2]], "input_ids": [[3, 4]]', "[[1, 2]]}", "{}"),
    *("[[+1, 2]]", "[[0x1, 2]]", "[[NaN, 2]]", "[[1, 2]] //", "[[1, 2]]\x00", "[[1, 2]]\u00e9", "[[1_0, 2]]"),
    *('"[[1, 2]]"', ""),
)
LAYOUTS = (
    b'{"input\\u005fids": [[5, 6]], "model": "a", "x\\"input_ids\\": [[1, 2]]": 1}',
    b'{"input\\u005fids": [[5, 6]], "encoding": "base64"}',
    b'{"encoding": "base64", "input_ids": [[5, 6]]}',
    b'{"input_ids":[[5,6]],"offset":[3],"encoding":"base64","dtype":"float32"}',
    b'\n{"offset": 1, "input_ids" :\t[ [5, 6]\n] , "output": "embeddings"}\n',
    b'{"input_ids": [[5, 6]], "position_ids": [[5, 6]]}',
    b'{"input_ids": [[5, 6]], "attention_mask": [[1, 0]]}',
    b'{"input_ids": [[5, 6]], "pooling": "mean"}',
    b'{"input_ids": [[5, 6]], "encoding": "float"}',
    b'{"input_ids": [[5, 6]], "dtype": "float16"}',
    b'{"input_ids": [5, 6]}',
)


@pytest.mark.parametrize("accept", ["application/json", BYTES])
def test_other_ids_get_same_response_if_prepared(connection: HTTPConnection, accept: str) -> None:
    for text in OTHERS:
        known, body = document([[5, 6]], 90, dtype="float32"), document(text, 90, dtype="float32")
        for _ in range(2):
            assert ask(connection, known, accept)[0] == 200
        assert ask(connection, body, accept) == alone(connection, body, accept), text


def test_body_in_any_layout_gets_same_response(connection: HTTPConnection) -> None:
    for body in LAYOUTS:
        for ids in (b"5, 6", b"2, 4", b"3, 1"):
            sent = body.replace(b"5, 6", ids).replace(b"5,6", ids.replace(b" ", b""))
            assert ask(connection, sent) == alone(connection, sent), sent


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(text=st.text(st.sampled_from('[[]]0123456789,, -+.eE"tru{}:\\ \n'), max_size=24))
def test_random_text_gets_same_response_if_prepared(tiny_server: Server, text: str) -> None:
    with closing(open_connection(tiny_server)) as connection:
        ask(connection, document([[5, 6]], 60))
        body = document(text, 60)
        assert ask(connection, body) == alone(connection, body)
