"""Requests prepared by an earlier request. Oracle: the general path of new headers and web pages."""

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from preblock.service.app import create_app, create_engine
from preblock.service.core.settings import Settings
from preblock.service.engine.engine import Engine
from preblock.service.server.run import configure
from tests.service.api.http.native_requests import BYTES, post
from tests.support.prepared import CountedRequests
from tests.support.servers import live_server

EMBED, EMBEDDINGS = "/models/bert/embed", "/v1/embeddings"
Answer = tuple[int, dict[str, str], bytes]


class Served:
    """A server, and the hits of its cache of prepared requests."""

    def __init__(self, http: httpx.Client, engine: Engine, hits: Callable[[], int]) -> None:
        self.http, self.engine, self.hits = http, engine, hits

    def ask(self, body: dict[str, Any] | bytes, path: str = EMBEDDINGS, **headers: str) -> Answer:
        """Return status, headers without those of time, and content."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        types = {"Content-Type": "application/json", "X-Request-Id": "mine"}
        found = self.http.post(path, content=content, headers=types | headers)
        kept = {name: value for name, value in found.headers.items() if name not in ("date", "server-timing")}
        return found.status_code, kept, found.content

    def alone(self, body: dict[str, Any] | bytes, path: str = EMBEDDINGS, **headers: str) -> Answer:
        """Return the answer of the general path."""
        return self.ask(body, path, **{"Sec-Fetch-Site": "same-origin"}, **headers)


@pytest.fixture(scope="module")
def served(static_repository: Path) -> Iterator[Served]:
    with run(Settings(repository=static_repository)) as served:
        yield served


@contextmanager
def run(settings: Settings) -> Iterator[Served]:
    engine = create_engine(settings)
    app = create_app(settings, engine)
    cache = CountedRequests(engine, app)
    with (
        live_server(configure(settings, app)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Accept-Encoding": ""}) as http,
    ):
        yield Served(http, engine, lambda: cache.hits)


def document(ids: str) -> bytes:
    """Return a body of one size with these ids as JSON text, so that the same headers fit."""
    begin = f'{{"input_ids": {ids}'.encode()
    assert len(begin) < 70
    return begin.ljust(70) + b', "dtype": "float32"}'


OTHERS = (
    *("[[1, 2]]", "[[ 1,2 ]]", " [[1\n,\t2]]", "[[6, 0]]"),  # allowed ids
    *("[1, 2]", "[[1], [2]]", "[[1, 2], [3, 4]]", "[[1, 2, 3]]", "[[1, 2], [3]]", "[[1]]"),  # of other shapes
    *("[[true, 2]]", "[[1, false]]", "[[1.0, 2]]", "[[1e0, 2]]", '["1", 2]', '[["1", 2]]', "[[null, 2]]", "null", "7"),
    *("[[1, -1]]", "[[1, 11]]", f"[[1, {2**63 - 1}]]", f"[[1, {2**63}]]", f"[[1, {-(2**63) - 1}]]"),
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
    b'{"input_ids": [[5, 6]], "attention_mask": [[1, 0]]}',
    b'{"input_ids": [[5, 6]], "pooling": "mean"}',
    b'{"input_ids": [[5, 6]], "dtype": "float16"}',
    b'{"input_ids": [5, 6]}',
)


@pytest.mark.parametrize("accept", ["application/json", BYTES])
def test_other_ids_get_same_response_if_prepared(served: Served, accept: str) -> None:
    for text in OTHERS:
        before = served.hits()
        for _ in range(2):
            assert served.ask(document("[[5, 6]]"), EMBED, Accept=accept)[0] == 200
        assert served.hits() > before
        body = document(text)
        assert served.ask(body, EMBED, Accept=accept) == served.alone(body, EMBED, Accept=accept), text


def test_body_in_any_layout_gets_same_response(served: Served) -> None:
    for body in LAYOUTS:
        for ids in (b"5, 6", b"2, 4", b"3, 1"):
            sent = body.replace(b"5, 6", ids).replace(b"5,6", ids.replace(b" ", b""))
            assert served.ask(sent, EMBED) == served.alone(sent, EMBED), sent


TEXT_OPTIONS: list[dict[str, Any]] = [
    {"model": "mapped"},
    {"model": "mapped:1", "dimensions": 3},
    {"model": "mapped", "encoding_format": "base64"},
    {"model": "mapped", "pooling": "first"},
    {"model": "bag", "pooling": "last", "user": 'a "input": "b" \\'},
    {"model": "bag", "add_special_tokens": True, "user": "me", "use_activation": True},
    {"model": "bert", "pooling": "mean"},
    {"model": "bert", "pooling": "mean", "add_special_tokens": False, "encoding_format": "base64"},
]


def test_text_gets_response_of_general_path(served: Served) -> None:
    values = ["a", ["a"], ["c b", "hello a", "b c"], ["a b", "c d"], 'é a \\ " \n ä', ["a ]", 'a", "b']]
    for options in TEXT_OPTIONS:

        def body(value: Any, options: dict[str, Any] = options) -> dict[str, Any]:
            return {"input": value, **options} if "user" in options else {**options, "input": value}

        assert served.ask(body("a b"))[0] == 200
        before = served.hits()
        for number, value in enumerate(values, 1):
            found = served.ask(body(value))
            assert (found, found[0]) == (served.alone(body(value)), 200), (options, value)
            assert served.hits() == before + number


OTHER_INPUTS = (
    *('""', "[]", '[""]', '["a", ""]', '["a", 1]', "1", "null", '"a', '"a" "b"', "[", '["a"]]', "{}", '[["a"]]'),
    *('"a", "input": "b"', '"a", "model": "bag"', '"a", "other": 1', '"\\ud800"', '"? !"', '["a", "?"]'),
    *('"a a a a a a a a a"', '" "', "[[4, 5]]", "[4, 5]", '"a"}', '"a", "truncate": "right"'),
)


def test_other_input_gets_response_of_general_path(served: Served) -> None:
    for text in OTHER_INPUTS:
        known, other = (f'{{"model": "mapped", "input": {value}}}'.encode() for value in ('"a b"', text))
        assert served.ask(known)[0] == 200
        assert served.ask(other) == served.alone(other), text
    long = [" ".join("abc") + " "] * 200  # over the limit of the event loop
    assert served.ask({"model": "bag", "input": "a"})[0] == 200
    for value in (long, " ".join(long)):
        assert served.ask({"model": "bag", "input": value}) == served.alone({"model": "bag", "input": value})


def test_input_in_ignored_field_is_no_text(served: Served) -> None:
    for inner in ("hello", "hello", "c"):
        body = {"model": "mapped", "metadata": {"input": inner}, "input": "a b"}
        assert served.ask(body) == served.alone(body)
        assert served.ask(body)[2] == served.ask({"model": "mapped", "input": "a b"})[2]


def test_request_without_fast_path_is_not_prepared(served: Served) -> None:
    before = served.hits()
    for further in ({}, {"pooling": "none"}, {"truncate": "left"}):
        headers = {"X-Number": str(further)} if further else {"Accept-Encoding": "gzip"}
        for text in ("a", "b"):
            assert served.ask({"model": "bag", "input": text, **further}, **headers)[0] == 200
    assert served.hits() == before


def test_limits_are_checked_if_prepared(static_repository: Path) -> None:
    """A request prepared from a shorter body also fits a longer one."""
    room = len('{"model": "bag", "input": ["a", "b", "c"]}')
    with run(
        Settings(repository=static_repository, max_request_rows=2, max_request_tokens=3, max_body_bytes=room)
    ) as served:
        for value, status in (("a", 200), (["a", "b", "c"], 400), ("a a a a", 400), ("a" * 30, 413)):
            found = served.ask({"model": "bag", "input": value})
            assert (found, found[0]) == (served.alone({"model": "bag", "input": value}), status)


def test_metrics_and_log_have_prepared_requests(static_repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with run(Settings(repository=static_repository, access_log_sample_rate=1, access_log_max_token_ids=8)) as served:
        for _ in range(3):
            assert served.ask({"model": "bag", "input": ["a b", "c"]})[0] == 200
        assert served.hits() == 2
        found = served.http.get("/metrics").text
    assert 'preblock_requests_total{model="bag",outcome="ok",protocol="openai"} 3.0' in found
    assert 'preblock_tokens_total{model="bag"} 9.0' in found
    assert capfd.readouterr().err.count("[[4, 5], [6]]") == 3


def test_unloaded_model_is_freed(tiny_repository: Path) -> None:
    with run(Settings(repository=tiny_repository)) as served:
        ids = np.array([1, 2]).tobytes()
        assert [post(served.http, "gpt", BYTES, ids, BYTES).status_code for _ in range(2)] == [200, 200]
        model = weakref.ref(served.engine.repository.find("gpt"))
        served.engine.repository.refresh({"bert"})
        gc.collect()
        assert model() is None
