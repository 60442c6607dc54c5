"""Requests of JSON that differ in their ids alone are read and answered by what is known of one before.

Oracles: the PyTorch module, and the answers to the same bodies with a header that no request had before.
"""

import base64
import gzip
import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from socket import create_server
from threading import Thread
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import uvicorn
from hypothesis import strategies as st

from preblock.export.exporter import export_loaded
from preblock.export.source import LoadedSource
from preblock.models.embeddings import GPT2Embeddings
from preblock.models.modules.initialisers import seeded_
from preblock.service.app import create_app
from preblock.service.artifacts.records import Source
from preblock.service.core.settings import Settings
from preblock.service.server.run import configure
from preblock.service.server.tensor_responder import TensorResponder

VOCABULARY, WIDTH, LONGEST = 50, 768, 700
MODULE = GPT2Embeddings(VOCABULARY, WIDTH, LONGEST)
BYTES, NPY = "application/octet-stream", "application/x-npy"
SHAPES = [(1, 1), (1, 3), (2, 50), (1, 515), (3, 400)]
"""Of which the vectors are copied, sent at once, and sent in pieces; of base64 the last of three has other ends."""
NUMBERS = count()


class Counting:
    """Counts the requests for tensors that are answered without a template."""

    anew = 0


@pytest.fixture(scope="module", autouse=True)
def counted() -> Iterator[None]:
    """Count the calls of `TensorResponder.answer`."""
    answer = TensorResponder.answer

    def counting(*arguments: Any) -> None:
        Counting.anew += 1
        answer(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorResponder, "answer", counting)
        yield


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    root: Path = tmp_path_factory.mktemp("models")
    seeded_(MODULE.eval(), 4)
    export_loaded(LoadedSource(MODULE, Source(kind="module")), "gpt", root)
    server = uvicorn.Server(configure(Settings(), create_app(Settings(repository=root))))
    with create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        yield int(listener.getsockname()[1])
        server.should_exit = True
        thread.join()


@pytest.fixture
def connection(port: int) -> Iterator[HTTPConnection]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        yield connection


def ask(
    connection: HTTPConnection, body: bytes, accept: str = "application/json", **headers: str
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return status, headers but for those of time, and body."""
    types = {"Content-Type": "application/json", "Accept": accept, "X-Request-Id": "mine"}
    connection.request("POST", "/models/gpt/embed", body, types | headers)
    answer = connection.getresponse()
    told = [pair for pair in answer.getheaders() if pair[0] not in ("date", "server-timing")]
    return answer.status, told, answer.read()


def alone(connection: HTTPConnection, body: bytes, accept: str = "application/json") -> tuple[int, Any, bytes]:
    """Return what a request is answered of which nothing is known."""
    return ask(connection, body, accept, **{"X-Number": str(next(NUMBERS))})


def document(ids: Any, size: int, **fields: Any) -> bytes:
    """Return a body of so many bytes; the ids are JSON or its text."""
    text = ids if isinstance(ids, str) else json.dumps(ids)
    rest = "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    begin, end = f'{{"input_ids": {text}'.encode(), f"{rest}}}".encode()
    assert len(begin) + len(end) <= size
    return begin + b" " * (size - len(begin) - len(end)) + end


def vectors(ids: Any, offset: int) -> bytes:
    with torch.no_grad():
        return bytes(MODULE(torch.tensor(ids), torch.tensor([offset])).numpy().tobytes())


@pytest.mark.parametrize("accept", ["application/json", BYTES, NPY])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_has_the_vectors_of_its_own_ids(connection: HTTPConnection, shape: tuple[int, int], accept: str) -> None:
    random, size = np.random.default_rng(shape), 40 + 4 * shape[0] * (shape[1] + 1)
    for number in range(4):
        before, offset = Counting.anew, 7
        ids = random.integers(0, VOCABULARY, shape).tolist()
        body = document(ids, size, offset=offset)
        found = ask(connection, body, accept)
        assert Counting.anew == before + (number == 0)
        assert found == alone(connection, body, accept)
        status, _, content = found
        assert status == 200
        if accept == "application/json":
            answer = json.loads(content)
            assert (answer["shape"], answer["next_offset"]) == ([*shape, WIDTH], [offset + shape[1]] * shape[0])
            content = base64.b64decode(answer["embeddings"], validate=True)
        assert content.endswith(vectors(ids, offset))


OTHERS = [
    *("[[1, 2]]", "[[ 1,2 ]]", " [[1\n,\t2]]", "[[49, 0]]"),  # what is allowed
    *("[1, 2]", "[[1], [2]]", "[[1, 2], [3, 4]]", "[[1, 2, 3]]", "[[1, 2], [3]]", "[[1]]"),  # of other shapes
    *("[[true, 2]]", "[[1, false]]", "[[1.0, 2]]", "[[1e0, 2]]", '["1", 2]', '[["1", 2]]', "[[null, 2]]", "null", "7"),
    *(
        "[[1, -1]]",
        "[[1, 50]]",
        "[[1, 9223372036854775807]]",
        "[[1, 9223372036854775808]]",
        "[[1, -9223372036854775809]]",
    ),
    *(
        "[[[1, 2]]]",
        "[]",
        "[[]]",
        "[[], []]",
        "[[1, 2],]",
        "[[1, 2,]]",
        "[[1 2]]",
        "[[1, 2]",
        "[1, 2]]",
        "[[01, 2]]",
        "",
    ),
    *('[[1, 2]], "offset": 3', '[[1, 2]], "pooling": "mean"', '[[1, 2]], "input_ids": [[3, 4]]', "[[1, 2]]}", "{}"),
    *(
        "[[+1, 2]]",
        "[[0x1, 2]]",
        "[[NaN, 2]]",
        "[[1, 2]] //",
        "[[1, 2]]\x00",
        "[[1, 2]]\u00e9",
        '"[[1, 2]]"',
        "[[1_0, 2]]",
    ),
]


@pytest.mark.parametrize("accept", ["application/json", BYTES])
@pytest.mark.parametrize("text", OTHERS)
def test_what_else_stands_there_is_answered_as_it_would_be_alone(
    connection: HTTPConnection, text: str, accept: str
) -> None:
    known, body = document([[5, 6]], 90, dtype="float32"), document(text, 90, dtype="float32")
    for _ in range(2):
        assert ask(connection, known, accept)[0] == 200
    assert ask(connection, body, accept) == alone(connection, body, accept)
    assert ask(connection, known, accept)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
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
    ],
)
def test_a_body_of_any_form_is_answered_as_it_would_be_alone(connection: HTTPConnection, body: bytes) -> None:
    for ids in (b"5, 6", b"8, 9", b"7, 1"):
        sent = body.replace(b"5, 6", ids).replace(b"5,6", ids.replace(b" ", b""))
        assert ask(connection, sent) == alone(connection, sent)


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(text=st.text(st.sampled_from('[[]]0123456789,, -+.eE"tru{}:\\ \n'), max_size=24))
def test_any_text_there_is_answered_as_it_would_be_alone(port: int, text: str) -> None:
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        ask(connection, document([[5, 6]], 60))
        body = document(text, 60)
        assert ask(connection, body) == alone(connection, body)


def test_a_long_body_is_read_by_others(connection: HTTPConnection) -> None:
    """In the event loop it would take longer than others should wait."""
    ids = [[1] * LONGEST] * 6
    before = Counting.anew
    for _ in range(3):
        assert ask(connection, json.dumps({"input_ids": ids}).encode())[0] == 200
    assert Counting.anew == before + 3


def test_a_coding_is_kept_apart(connection: HTTPConnection) -> None:
    body = document([[1, 2]], 60)
    plain = ask(connection, body)
    for _ in range(3):
        status, told, content = ask(connection, body, **{"Accept-Encoding": "gzip"})
        assert (status, gzip.decompress(content)) == (200, plain[2])
        assert ("content-encoding", "gzip") in told
