"""Requests with the header block of the request before, and other bytes of the same look.

Oracle: the answers to the same requests on connections of their own.
"""

import asyncio
import dataclasses
import gc
import re
import shutil
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import tests.support.profiles  # noqa: F401
from preblock.service.app import create_app
from preblock.service.core.settings import Settings
from preblock.service.observability.context import RequestContext
from preblock.service.server.http_connection import HttpConnection
from preblock.service.server.read_scheduler import ReadTurns
from preblock.service.server.run import configure
from preblock.service.server.uvicorn_bridge import ConnectionFactory, ServerState
from tests.support.artifacts import copy_artifact
from tests.support.connections import RawConnection, http_request
from tests.support.servers import Server, live_server, serve
from tests.support.waiting import wait_until

BYTES = "application/octet-stream"
EMBED = "/models/gpt/embed"
WIDTH = 4


@pytest.fixture(scope="module")
def address(wide_server: Server) -> str:
    return wide_server.address


def request(*ids: int, path: str = EMBED, **more: str) -> bytes:
    """Return a request for one row."""
    headers = {"Content-Type": BYTES, "Accept": BYTES, **more}
    return http_request(f"{path}?shape=1,{len(ids)}", np.array([ids]).tobytes(), headers)


def alone(address: str, sent: bytes) -> tuple[int, bytes]:
    """Return status and body of the answer to a request on a connection of its own."""
    with RawConnection(address) as client:
        status, _, body = client.ask(sent)
    return status, re.sub(rb'"request_id":"[^"]*"', b"", body)


def test_empty_lines_are_not_a_head(address: str) -> None:
    sent = request(1, 2)
    size = len(np.array([1, 2]).tobytes())
    with RawConnection(address) as client:
        for _ in range(3):
            client.send(b"\r\n\r\n" + sent[:size], sent[size:])
            assert client.answer()[0] == 200
        client.send(b"\r\n\r\n" + bytes(size))
        assert client.answer()[0] == 400


def chunked(*ids: int) -> bytes:
    """Return the same request as `request` does, in two chunks."""
    head, _, body = request(*ids).partition(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
    return b"%b\r\n\r\n3\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, body[:3], len(body) - 3, body[3:])


def around(begin: bytes, ids: tuple[int, int] = (1, 2)) -> bytes:
    """Return a request that contains another: in a header after `begin`, or in its body."""
    inner = request(*ids)
    length = b"" if begin else b"Content-Length: %d\r\n\r\n" % len(inner)
    host = b"" if begin else b"Host: localhost\r\n"  # the inner request has one in its headers
    return b"POST /v2/nowhere HTTP/1.1\r\n" + host + begin + length + inner


KINDS = (
    *(request(1, 2), request(3, 4), request(1, 2), request(5), request(1, 70000), request(*range(40))),
    *(chunked(1, 2), around(b"X-Other: "), around(b""), around(b"", (3, 4))),
    *(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n" + request(3, 4)),
)


@hypothesis.given(st.integers(0, 2**32))
def test_random_segments_equal_single_requests(address: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    kinds = random.integers(0, len(KINDS), 12).tolist()
    sent = b"".join(KINDS[kind] for kind in kinds)
    begins = [match.start() for match in re.finditer(b"POST|GET", sent) if random.random() < 0.8]
    bodies = [match.end() for match in re.finditer(b"\r\n\r\n", sent) if random.random() < 0.4]
    cuts = sorted({0, len(sent), *begins, *bodies, *random.integers(0, len(sent), random.integers(3)).tolist()})
    parts = [sent[begin:end] for begin, end in pairwise(cuts)]
    with RawConnection(address) as client:
        client.send(*parts)
        found = [client.answer() for _ in kinds]
    for kind, (status, _, body) in zip(kinds, found, strict=True):
        assert (status, re.sub(rb'"request_id":"[^"]*"', b"", body)) == answer_alone(address, kind)


@cache
def answer_alone(address: str, kind: int) -> tuple[int, bytes]:
    return alone(address, KINDS[kind])


INNER = request(1, 2)
NOWHERE = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("begin", "end", "status"),
    [
        (b"G", b"", 400),  # of another method
        (b"POST /livez HTTP/1.1\r\nX-Other: ", b"", 405),  # with the first line as its value
        (NOWHERE + b"Content-Length: %d\r\n\r\n" % len(INNER), b"", 404),
        (NOWHERE + b"Content-Length: %d\r\n\r\n." % (len(INNER) + 2), b".", 404),
        (NOWHERE + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(INNER), b"\r\n0\r\n\r\n", 404),
        (INNER[:-1], b"", 422),  # with a large last id by its first byte, and no request behind
    ],
)
def test_request_inside_another_is_not_executed(address: str, begin: bytes, end: bytes, status: int) -> None:
    """A proxy and the server must agree on the end of a request; otherwise one client gets the answer of another."""
    with RawConnection(address) as client:
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
    with RawConnection(address) as client:
        assert client.ask(INNER)[0] == 200


def test_ipv4_proxy_of_an_ipv6_server_is_trusted(tiny_repository: Path) -> None:
    """Its address is `::ffff:127.0.0.1` there. The limit tells the clients apart."""
    options = "--host", "::", "--trusted-proxies", "127.0.0.0/8", "--rate-limit-per-second", "0.01"
    with serve(tiny_repository, *options) as server:
        address = server.address.replace("[::]", "127.0.0.1")
        with RawConnection(address) as client:
            for number in range(2):
                proxied = {"X-Forwarded-For": f"192.0.2.{number}"}
                assert [client.ask(request(1, 2, **proxied))[0] for _ in range(2)] == [200, 429]
                proxied = {"X-Forwarded-For": f"198.51.100.{number}"}
                sent = http_request("/models/gpt/positions", headers=proxied, method="GET")
                assert [client.ask(sent)[0] for _ in range(2)] == [200, 429]


def test_new_version_answers_until_removed(tmp_path: Path) -> None:
    copy_artifact("gpt-50x4x9", tmp_path, "gpt")
    poll = "--model-control", "poll", "--model-poll-interval-seconds", "0.2"
    with serve(tmp_path, *poll) as server, RawConnection(server.address) as client:
        sent = request(1, 2)
        old = [client.ask(sent)[2] for _ in range(3)][-1]
        copy_artifact("gpt-50x4x9-again", tmp_path, "gpt")

        def is_answered_by(version: int) -> bool:
            _, headers, vectors = client.ask(sent)
            found = f"preblock-version: {version}" in headers
            assert (vectors == old) == (found == (version == 1))
            return found

        wait_until(lambda: is_answered_by(2))
        shutil.rmtree(tmp_path / "gpt" / "2")
        wait_until(lambda: is_answered_by(1))


def test_idle_connection_keeps_no_request(wide_repository: Path) -> None:
    path, settings = "/models/gpt/versions/1/embed", Settings(repository=wide_repository, port=0)

    def is_kept(found: object) -> bool:
        # `isinstance` would read properties of objects of torch, which warn.
        return type(found) is RequestContext and found.target == ("POST", path, "127.0.0.1")

    with live_server(configure(settings, create_app(settings))) as port, ExitStack() as stack:
        clients = [stack.enter_context(RawConnection(f"http://127.0.0.1:{port}")) for _ in range(3)]
        for client in clients * 3:
            assert client.ask(request(1, 2, path=path))[0] == 200
        wait_until(lambda: not any(map(is_kept, gc.get_objects())), seconds=5)


class HeldTurns(ReadTurns):
    """Reads no large input while it is held."""

    held = False

    def read(self) -> None:
        if not self.held:
            super().read()


@pytest.mark.parametrize("parts", [1, 2])
def test_held_head_is_read_once_at_shutdown(tiny_repository: Path, parts: int) -> None:
    """Its body has not come when the shutdown begins, or waits for a turn."""
    ids = np.ones((1000, 3), np.int64)
    sent = http_request(f"{EMBED}?shape=1000,3", ids.tobytes(), {"Content-Type": BYTES, "Accept": BYTES})
    head_size = sent.index(b"\r\n\r\n") + 4

    async def run() -> list[bytes]:
        settings = Settings(repository=tiny_repository)
        config, turns = configure(settings, create_app(settings)), HeldTurns(asyncio.get_running_loop())
        config.load()
        shared = ConnectionFactory(HttpConnection, settings).share(config, ServerState(), {})
        connection = HttpConnection(dataclasses.replace(shared, turns=turns))
        server = await asyncio.get_running_loop().create_server(lambda: connection, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        answers: list[bytes] = []
        for number in range(3):
            for place, part in enumerate((sent[:head_size], sent[head_size:-8], sent[-8:])):
                if (number, place) == (2, parts):
                    connection.shutdown()
                turns.held = number == 2 and place < 2
                turns.read()
                writer.write(part)
                await asyncio.sleep(0.05)
            answers.append((await reader.readuntil(b"\r\n\r\n"))[:12])
            await reader.readexactly(ids.size * WIDTH * 4)
        writer.close()
        server.close()
        return answers

    assert asyncio.run(run()) == [b"HTTP/1.1 200"] * 3
