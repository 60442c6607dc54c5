"""Requests prepared by an earlier request. Oracles: model2vec, and the general path of new headers and web pages."""

import gc
import hashlib
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from model2vec import StaticModel

import tests.support.profiles  # noqa: F401
from preblock.service.app import create_app, create_engine
from preblock.service.artifacts.io import describe
from preblock.service.artifacts.names import DATA, MANIFEST, TOKENIZER
from preblock.service.core.auth import new_key
from preblock.service.core.settings import Settings
from preblock.service.engine.engine import Engine
from preblock.service.server.run import configure
from tests.service.api.http.native_requests import BYTES, post
from tests.support.artifacts import copy_artifact
from tests.support.prepared import CountedRequests
from tests.support.references import edit_manifest
from tests.support.servers import Server, live_server
from tests.support.shared import Shared
from tests.support.static_models import WIDTH, make_table

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


Answer = tuple[int, dict[str, str], Any]


@pytest.fixture(scope="module")
def text_repository(static_repository: Path, shared: Shared) -> Path:
    """Return a repository of models with few tokens: `mapped`, `bag`, `infinite` with an infinite value, and `bert`."""

    def fill(root: Path) -> None:
        for name in ("mapped", "bag", "bert"):
            (root / name).symlink_to(static_repository / name)
        shutil.copytree(static_repository / "bag", root / "infinite")
        make_infinite(root / "infinite" / "1")

    return shared.make("texts", fill)


def make_infinite(folder: Path) -> None:
    """Make the vector of the token `a` infinite. The export refuses such a table, an artifact may have it."""
    data, row = (folder / DATA).read_bytes(), make_table()[4].tobytes()
    changed = data.replace(row, np.full(WIDTH, np.inf, np.float32).tobytes())
    assert changed != data
    (folder / DATA).write_bytes(changed)
    before, after = (hashlib.sha256(content).hexdigest() for content in (data, changed))
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace(before, after))


class Texts:
    """A server, and the hits of its cache of prepared requests."""

    def __init__(self, http: httpx.Client, engine: Engine, hits: Callable[[], int]) -> None:
        self.http, self.engine, self.hits = http, engine, hits

    def ask(self, body: dict[str, Any] | bytes, **headers: str) -> Answer:
        """Return status, headers without those of time, and document."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        types = {"Content-Type": "application/json", "X-Request-Id": "mine"}
        found = self.http.post("/v1/embeddings", content=content, headers=types | headers)
        kept = {name: value for name, value in found.headers.items() if name not in ("date", "server-timing")}
        return found.status_code, kept, found.json()

    def alone(self, body: dict[str, Any] | bytes) -> Answer:
        """Return the answer of the general path."""
        return self.ask(body, **{"Sec-Fetch-Site": "same-origin"})


@pytest.fixture(scope="module")
def texts(text_repository: Path) -> Iterator[Texts]:
    with run(Settings(repository=text_repository)) as texts:
        yield texts


@contextmanager
def run(settings: Settings, **headers: str) -> Iterator[Texts]:
    engine = create_engine(settings)
    app = create_app(settings, engine)
    cache = CountedRequests(engine, app)
    with (
        live_server(configure(settings, app)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Accept-Encoding": "", **headers}) as http,
    ):
        yield Texts(http, engine, lambda: cache.hits)


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


def test_text_gets_response_of_general_path(texts: Texts) -> None:
    values = ["a", ["a"], ["c b", "hello a", "b c"], ["a b", "c d"], 'é a \\ " \n ä', ["a ]", 'a", "b']]
    for options in TEXT_OPTIONS:

        def body(value: Any, options: dict[str, Any] = options) -> dict[str, Any]:
            return {"input": value, **options} if "user" in options else {**options, "input": value}

        assert texts.ask(body("a b"))[0] == 200
        before = texts.hits()
        for number, value in enumerate(values, 1):
            found = texts.ask(body(value))
            assert (found, found[0]) == (texts.alone(body(value)), 200), (options, value)
            assert texts.hits() == before + number


def test_prepared_vectors_equal_model2vec(texts: Texts, static_sources: Path) -> None:
    sentences, before = ["hello world", "abc ? jih", "hello hello !! b"], texts.hits()
    found = [texts.ask({"model": "mapped", "input": text, "dimensions": 8})[2] for text in sentences]
    assert texts.hits() >= before + 2
    expected = StaticModel.from_pretrained(static_sources / "mapped").encode(sentences)
    vectors = [document["data"][0]["embedding"] for document in found]
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=2e-7)


OTHER_INPUTS = (
    *('""', "[]", '[""]', '["a", ""]', '["a", 1]', "1", "null", '"a', '"a" "b"', "[", '["a"]]', "{}", '[["a"]]'),
    *('"a", "input": "b"', '"a", "model": "bag"', '"a", "other": 1', '"\\ud800"', '"? !"', '["a", "?"]'),
    *('"a a a a a a a a a"', '" "', "[[4, 5]]", "[4, 5]", '"a"}', '"a", "truncate": "right"'),
)


def test_other_input_gets_response_of_general_path(texts: Texts) -> None:
    for text in OTHER_INPUTS:
        known, other = (f'{{"model": "mapped", "input": {value}}}'.encode() for value in ('"a b"', text))
        assert texts.ask(known)[0] == 200
        assert texts.ask(other) == texts.alone(other), text
    long = [" ".join("abc") + " "] * 200  # over the limit of the event loop
    assert texts.ask({"model": "bag", "input": "a"})[0] == 200
    for value in (long, " ".join(long)):
        assert texts.ask({"model": "bag", "input": value}) == texts.alone({"model": "bag", "input": value})


def test_input_in_ignored_field_is_no_text(texts: Texts) -> None:
    for inner in ("hello", "hello", "c"):
        body = {"model": "mapped", "metadata": {"input": inner}, "input": "a b"}
        assert texts.ask(body) == texts.alone(body)
        assert texts.ask(body)[2] == texts.ask({"model": "mapped", "input": "a b"})[2]


def test_infinite_value_is_rejected_if_prepared(texts: Texts) -> None:
    assert texts.ask({"model": "infinite", "input": "b"})[0] == 200
    before = texts.hits()
    found = texts.ask({"model": "infinite", "input": "a"})
    assert (found, found[0], texts.hits()) == (texts.alone({"model": "infinite", "input": "a"}), 400, before + 1)
    assert texts.ask({"model": "infinite", "input": "c"})[0] == 200


def test_request_without_fast_path_is_not_prepared(texts: Texts) -> None:
    before = texts.hits()
    for further in ({}, {"pooling": "none"}, {"truncate": "left"}):
        headers = {"X-Number": str(further)} if further else {"Accept-Encoding": "gzip"}
        for text in ("a", "b"):
            assert texts.ask({"model": "bag", "input": text, **further}, **headers)[0] == 200
    assert texts.hits() == before


def test_limits_are_checked_if_prepared(text_repository: Path) -> None:
    """A request prepared from a shorter body also fits a longer one."""
    room = len('{"model": "bag", "input": ["a", "b", "c"]}')
    with run(
        Settings(repository=text_repository, max_request_rows=2, max_request_tokens=3, max_body_bytes=room)
    ) as texts:
        for value, status in (("a", 200), (["a", "b", "c"], 400), ("a a a a", 400), ("a" * 30, 413)):
            found = texts.ask({"model": "bag", "input": value})
            assert (found, found[0]) == (texts.alone({"model": "bag", "input": value}), status)


def test_word_without_token_is_rejected_if_prepared(tmp_path: Path) -> None:
    folder = copy_artifact("bert", tmp_path / "repository")
    file = folder / TOKENIZER
    file.write_text(file.read_text().replace('"unk_token": "[UNK]"', '"unk_token": "none"'))
    edit_manifest(folder, lambda manifest: manifest["files"].update({TOKENIZER: describe(file).model_dump()}))
    with run(Settings(repository=tmp_path / "repository")) as texts:
        fields = {"model": "bert", "pooling": "mean"}
        assert [texts.ask(fields | {"input": text})[0] for text in ("a", "zebra", "a")] == [200, 400, 200]
        assert texts.hits() == 2


def test_rate_of_requests_is_limited_if_prepared(text_repository: Path) -> None:
    with run(Settings(repository=text_repository, rate_limit_per_second=2)) as texts:
        statuses = [texts.ask({"model": "bag", "input": "a"})[0] for _ in range(4)]
        assert (statuses[:2], statuses[-1]) == ([200, 200], 429)


def test_callers_are_authorized_if_prepared(text_repository: Path, tmp_path: Path) -> None:
    allowed, other = (new_key(name, (model,), admin=False) for name, model in (("a", "bag"), ("b", "bert")))
    (tmp_path / "keys.toml").write_text(allowed[1] + other[1])
    with run(Settings(repository=text_repository, api_keys_file=tmp_path / "keys.toml")) as texts:
        keys = allowed[0], allowed[0], other[0], "wrong"
        asked = [texts.ask({"model": "bag", "input": "a"}, Authorization=f"Bearer {key}")[0] for key in keys]
        assert (asked, texts.hits()) == ([200, 200, 403, 401], 1)


def test_metrics_and_log_have_prepared_requests(text_repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with run(Settings(repository=text_repository, access_log_sample_rate=1, access_log_max_token_ids=8)) as texts:
        for _ in range(3):
            assert texts.ask({"model": "bag", "input": ["a b", "c"]})[0] == 200
        assert texts.hits() == 2
        found = texts.http.get("/metrics").text
    assert 'preblock_requests_total{model="bag",outcome="ok",protocol="openai"} 3.0' in found
    assert 'preblock_tokens_total{model="bag"} 9.0' in found
    assert capfd.readouterr().err.count("[[4, 5], [6]]") == 3


def test_unloaded_model_is_freed(tiny_repository: Path) -> None:
    settings = Settings(repository=tiny_repository)
    engine = create_engine(settings)
    ids = np.array([1, 2]).tobytes()
    with (
        live_server(configure(settings, create_app(settings, engine))) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        assert [post(http, "gpt", BYTES, ids, BYTES).status_code for _ in range(2)] == [200, 200]
        model = weakref.ref(engine.repository.find("gpt"))
        engine.repository.refresh({"bert"})
        assert post(http, "gpt", BYTES, ids, BYTES).status_code == 404
        gc.collect()
        assert model() is None
