"""A request whose head is that of the last of its connection is answered without reading that again, as any other.

Oracles: the answers to the same requests on connections of their own, and how many heads the server has read.
"""

import re
import socket
import time
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Thread

import httpx
import hypothesis
import numpy as np
import pytest
import uvicorn
from hypothesis import strategies as st

from preblock.export.exporter import export_loaded
from preblock.export.source import LoadedSource
from preblock.models.embeddings import GPT2Embeddings
from preblock.service.app import create_app
from preblock.service.artifacts.records import Source
from preblock.service.core.auth import new_key
from preblock.service.core.settings import Settings
from preblock.service.server.front import Front
from preblock.service.server.run import configure
from tests.support.servers import Server, serve

BYTES = "application/octet-stream"
EMBED = "/models/gpt/embed"
VOCABULARY = 50
KEPT_SECONDS = 5
"""For which uvicorn keeps a connection between two requests."""


class Counting(Front):
    """Counts the heads that are read."""

    heads = 0

    def on_headers_complete(self) -> None:
        Counting.heads += 1
        super().on_headers_complete()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    root = tmp_path_factory.mktemp("models")
    export_loaded(LoadedSource(GPT2Embeddings(VOCABULARY, 768, 700), Source(kind="module")), "gpt", root)
    config = configure(Settings(), create_app(Settings(repository=root)))
    config.http = Counting
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        yield int(listener.getsockname()[1])
        server.should_exit = True
        thread.join()


def request(*ids: int, path: str = EMBED, more: str = "") -> bytes:
    """Return a request for one row, all of it."""
    body = np.array([ids]).tobytes()
    head = f"POST {path}?shape=1,{len(ids)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: {BYTES}\r\nAccept: {BYTES}\r\n{more}\r\n".encode() + body


class Connection:
    """A connection of a client that sends what it is told to."""

    def __init__(self, port: int) -> None:
        self.stream = socket.create_connection(("127.0.0.1", port))
        self.stream.settimeout(20)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.stream.makefile("rb")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.stream.close()

    def send(self, *parts: bytes) -> None:
        """Send parts that are read one by one."""
        for part in parts:
            self.stream.sendall(part)
            if part is not parts[-1]:
                time.sleep(0.003)

    def answer(self) -> tuple[int, str, bytes]:
        """Return the status, the lines of headers and the body of the next answer."""
        head = "".join(line.decode() for line in iter(self.file.readline, b"\r\n") if self.open(line))
        (length,) = re.findall(r"content-length: (\d+)", head.lower())
        return int(head.split()[1]), head, self.file.read(int(length))

    def ask(self, sent: bytes) -> tuple[int, str, bytes]:
        self.send(sent)
        return self.answer()

    @staticmethod
    def open(line: bytes) -> bool:
        assert line, "the connection was closed"
        return True


def port_of(server: Server) -> int:
    return httpx.URL(server.address).port or 0


def alone(port: int, sent: bytes) -> tuple[int, bytes]:
    """Return the status and the body of the answer to what is asked on a connection of its own."""
    with Connection(port) as client:
        status, _, body = client.ask(sent)
    return status, re.sub(rb'"request_id":"[^"]*"', b"", body)


def test_it_is_not_read_again_and_has_its_own_answer(port: int) -> None:
    random = np.random.default_rng(0)
    for length in (1, 5, 100, 600):  # which share a run, have one of their own, and come in pieces
        asked = [request(*random.integers(0, VOCABULARY, length)) for _ in range(6)]
        expected = [alone(port, sent) for sent in asked]
        before = Counting.heads
        with Connection(port) as client:
            found = [client.ask(sent) for sent in asked]
        assert Counting.heads == before + 1
        assert [(status, body) for status, _, body in found] == expected
        ids = {re.findall(r"x-request-id: (\S+)", head)[0] for _, head, _ in found}
        assert len(ids) == len(asked)
        assert all("server-timing: parse;dur=" in head for _, head, _ in found)


@pytest.mark.parametrize("length", [1, 100, 600])
@pytest.mark.parametrize("apart", [1, 2])
def test_nor_is_it_where_its_body_comes_apart(port: int, length: int, apart: int) -> None:
    """As `http.client`, and all that is built on it, sends it. A body in several parts is rare, and read."""
    asked = [request(*np.random.default_rng(seed).integers(0, VOCABULARY, length)) for seed in range(6)]
    expected = [alone(port, sent) for sent in asked]
    begin = asked[0].index(b"\r\n\r\n") + 4
    before = Counting.heads
    with Connection(port) as client:
        found = []
        for sent in asked:
            client.send(sent[:begin], *([sent[begin:]] if apart == 1 else [sent[begin:-3], sent[-3:]]))
            found.append(client.answer())
    assert before < Counting.heads <= before + (1 if apart == 1 else 6)
    assert [(status, body) for status, _, body in found] == expected


def test_a_head_that_is_held_waits_for_its_body_as_any_other(port: int) -> None:
    sent, other = request(1, 2), request(3)
    begin = sent.index(b"\r\n\r\n") + 4
    expected, of_other = alone(port, sent)[1], alone(port, other)[1]
    with Connection(port) as client:
        for _ in range(3):
            assert client.ask(sent)[2] == expected
        client.send(sent[:begin])
        time.sleep(KEPT_SECONDS + 1)
        client.send(sent[begin:] + other + sent[:begin])
        assert [client.answer()[2] for _ in range(2)] == [expected, of_other]
        assert client.ask(sent[begin:])[2] == expected
        client.send(sent[:begin])
    assert alone(port, sent)[1] == expected


def test_empty_lines_before_it_are_no_head(port: int) -> None:
    sent = request(1, 2)
    size = len(np.array([1, 2]).tobytes())
    with Connection(port) as client:
        for _ in range(3):
            client.send(b"\r\n\r\n" + sent[:size], sent[size:])
            assert client.answer()[0] == 200
        client.send(b"\r\n\r\n" + bytes(size))
        assert client.answer()[0] == 400


def test_a_bad_one_is_refused_as_it_would_be_alone_and_the_next_is_answered(port: int) -> None:
    good = request(1, 2)
    expected = alone(port, good)
    with Connection(port) as client:
        for bad in (request(1, 70000), request(-1, 1), request(-(2**63), 2**63 - 1)):
            for sent in (good, good):
                status, _, body = client.ask(sent)
                assert (status, body) == expected
            status, _, body = client.ask(bad)
            assert (status, re.sub(rb'"request_id":"[^"]*"', b"", body)) == alone(port, bad)
            assert status == 422


@pytest.mark.parametrize("ids", [(1, 2), range(40)])
def test_others_may_come_between_and_at_once(port: int, ids: Iterable[int]) -> None:
    sent, other, health = request(*ids), request(3), b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    expected = {each: alone(port, each)[1] for each in (sent, other, health)}
    with Connection(port) as client:
        for between in ([], [other], [health], [sent], [sent, sent], [health, other], [sent, health, sent]):
            assert client.ask(sent)[2] == expected[sent]
            for _ in range(3):
                client.send(b"".join([*between, sent]))
                assert [client.answer()[2] for _ in [*between, sent]] == [expected[each] for each in [*between, sent]]
            client.send(b"\r\n", sent)  # which may stand before a request (RFC 9112, section 2.2)
            assert client.answer()[2] == expected[sent]


def test_it_may_come_in_any_two_parts(port: int) -> None:
    sent = request(1, 2)
    expected = alone(port, sent)[1]
    with Connection(port) as client:
        for end in range(1, len(sent)):
            assert client.ask(sent)[2] == expected
            client.send(sent[:end], sent[end:])
            assert client.answer()[2] == expected


def chunked(*ids: int) -> bytes:
    """Return the same request as `request` does, in two chunks."""
    head, _, body = request(*ids).partition(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
    return b"%b\r\n\r\n3\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, body[:3], len(body) - 3, body[3:])


def around(begin: bytes, ids: tuple[int, int] = (1, 2)) -> bytes:
    """Return a request within which all of another stands: in a header that `begin` begins, or in its body."""
    inner = request(*ids)
    length = b"" if begin else b"Content-Length: %d\r\n\r\n" % len(inner)
    return b"POST /v2/nowhere HTTP/1.1\r\nHost: x\r\n" + begin + length + inner


KINDS = (
    *(request(1, 2), request(3, 4), request(1, 2), request(5), request(1, 70000), request(*range(40))),
    *(chunked(1, 2), around(b"X-Other: "), around(b""), around(b"", (3, 4))),
    *(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n" + request(3, 4)),
)


@hypothesis.given(st.integers(0, 2**32))
def test_whatever_comes_in_whatever_parts_each_has_the_answer_that_it_has_alone(port: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds = random.integers(0, len(KINDS), 12).tolist()
    sent = b"".join(KINDS[kind] for kind in kinds)
    begins = [match.start() for match in re.finditer(b"POST|GET", sent) if random.random() < 0.8]
    bodies = [match.end() for match in re.finditer(b"\r\n\r\n", sent) if random.random() < 0.4]
    cuts = sorted({0, len(sent), *begins, *bodies, *random.integers(0, len(sent), random.integers(3)).tolist()})
    parts = [sent[begin:end] for begin, end in pairwise(cuts)]
    with Connection(port) as client:
        client.send(*parts)
        found = [client.answer() for _ in kinds]
    for kind, (status, _, body) in zip(kinds, found, strict=True):
        assert (status, re.sub(rb'"request_id":"[^"]*"', b"", body)) == answer_alone(port, kind)


@cache
def answer_alone(port: int, kind: int) -> tuple[int, bytes]:
    return alone(port, KINDS[kind])


INNER = request(1, 2)
NOWHERE = b"POST /nowhere HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("begin", "end", "status"),
    [
        (b"G", b"", 400),  # of another method
        (b"POST /livez HTTP/1.1\r\nHost: x\r\nX-Other: ", b"", 405),  # whose value is the first line
        (NOWHERE + b"Content-Length: %d\r\n\r\n" % len(INNER), b"", 404),
        (NOWHERE + b"Content-Length: %d\r\n\r\n." % (len(INNER) + 2), b".", 404),
        (NOWHERE + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(INNER), b"\r\n0\r\n\r\n", 404),
        (INNER[:-1], b"", 422),  # whose last id is large by its first byte, and what follows is no request
    ],
)
def test_the_same_bytes_within_another_request_are_a_part_of_it(
    port: int, begin: bytes, end: bytes, status: int
) -> None:
    """What a proxy takes for one request must be one here: else an answer would go to somebody else's request."""
    with Connection(port) as client:
        for _ in range(3):
            assert client.ask(INNER)[0] == 200
        client.send(begin, INNER, end)
        assert client.answer()[0] == status
        client.stream.settimeout(0.2)
        try:
            rest = client.stream.recv(2**16)
        except TimeoutError:
            client.stream.settimeout(20)
        else:
            assert rest[9:12] in (b"", b"400")  # and closed
            return
    with Connection(port) as client:
        assert client.ask(INNER)[0] == 200


def test_the_id_of_a_request_is_that_of_its_head(port: int) -> None:
    with Connection(port) as client:
        for wanted in ("one", "two"):
            for _ in range(3):
                assert f"x-request-id: {wanted}\r\n" in client.ask(request(1, more=f"X-Request-Id: {wanted}\r\n"))[1]


def test_it_needs_its_key_each_time(tiny_repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    (key, entry), (_, other) = new_key("gone", (), False), new_key("stays", (), False)
    narrow = entry.replace("[[keys]]", '[[keys]]\nmodels = ["bert"]')
    file.write_text(entry + other)
    sent = request(1, 2, more=f"Authorization: Bearer {key}\r\n")
    with serve(tiny_repository, "--api-keys-file", str(file)) as server, Connection(port_of(server)) as client:
        for then, after in ((narrow + other, 403), (entry + other, 200), (other, 401)):
            before = client.ask(sent)[0]
            file.write_text(then)
            deadline = time.monotonic() + 30
            while (status := client.ask(sent)[0]) != after:
                assert status == before
                assert time.monotonic() < deadline
            assert [client.ask(sent)[0] for _ in range(3)] == [after] * 3


def test_it_counts_towards_the_rate_of_who_asks(tiny_repository: Path, tmp_path: Path) -> None:
    """A rate that is set while the connection is open holds for it, too, and for each client behind a proxy."""
    config = tmp_path / "preblock.toml"
    config.write_text("")
    options = "--config-file", str(config), "--trusted-proxies", "127.0.0.1"
    with serve(tiny_repository, *options) as server, Connection(port_of(server)) as client:
        clients = [request(1, 2, more=f"X-Forwarded-For: 192.0.2.{number}\r\n") for number in range(2)]
        assert [client.ask(sent)[0] for sent in clients for _ in range(5)] == [200] * 10
        config.write_text("rate_limit_per_second = 4\n")
        deadline = time.monotonic() + 30
        while client.ask(clients[0])[0] == 200:
            assert time.monotonic() < deadline
        time.sleep(1)  # then all of them may ask as often as they like, for a second
        for sent in clients:
            assert [client.ask(sent)[0] for _ in range(6)] == [200] * 4 + [429] * 2


def test_an_empty_line_before_it_is_not_waited_for(tiny_repository: Path) -> None:
    sent = request(1, 2)
    with (
        serve(tiny_repository, "--stream-idle-seconds", "1") as server,
        Connection(port_of(server)) as client,
    ):
        for _ in range(3):
            assert client.ask(sent)[0] == 200
        client.send(b"\r\n", sent)
        assert client.answer()[0] == 200
        time.sleep(1.5)
        assert client.ask(sent)[0] == 200


def test_a_version_that_is_there_by_now_answers(tmp_path: Path) -> None:
    def export() -> None:
        export_loaded(LoadedSource(GPT2Embeddings(50, 4, 9), Source(kind="module")), "gpt", tmp_path)

    export()
    poll = "--model-control", "poll", "--model-poll-interval-seconds", "0.2"
    with serve(tmp_path, *poll) as server, Connection(port_of(server)) as client:
        sent = request(1, 2)
        old = [client.ask(sent)[2] for _ in range(3)][-1]
        export()
        deadline = time.monotonic() + 30
        while (new := client.ask(sent))[1].count("preblock-version: 1"):
            assert new[2] == old
            assert time.monotonic() < deadline
        assert "preblock-version: 2" in new[1]
        assert new[2] != old
        assert [client.ask(sent)[2] for _ in range(3)] == [new[2]] * 3


def test_all_of_them_are_counted(port: int) -> None:
    def counted() -> list[float]:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        names = (
            'preblock_requests_total{model="gpt",outcome="ok",protocol="native"}',
            'preblock_request_bytes_total{protocol="native"}',
            'preblock_response_bytes_total{protocol="native"}',
            'preblock_tokens_total{model="gpt"}',
        )
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(names))
        return [float(found.get(name, 0)) for name in names]

    with Connection(port) as client:
        (_, _, body) = client.ask(request(1, 2))
        before = counted()
        for _ in range(20):
            client.ask(request(3, 4))
        more = [after - then for then, after in zip(before, counted(), strict=True)]
    assert more == [20, 20 * 16, 20 * len(body), 40]


def test_a_head_is_not_remembered_for_the_request_behind_it(port: int) -> None:
    sent = request(1, 2)
    body = sent.partition(b"\r\n\r\n")[2]
    other = NOWHERE + b"Content-Length: %d\r\n\r\n" % len(body)
    with Connection(port) as client:
        for _ in range(2):
            assert client.ask(sent)[0] == 200
        for _ in range(3):
            client.send(other, body + sent)
            assert [client.answer()[0] for _ in range(2)] == [404, 200]
            assert client.ask(other + body)[0] == 404
