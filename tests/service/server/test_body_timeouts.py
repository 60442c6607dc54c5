"""Bodies that pause, trickle, or take long."""

import gc
import json
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from preblock.service.app import create_app, create_engine
from preblock.service.core.settings import Settings
from preblock.service.server.run import configure
from tests.support.connections import RawConnection, dial, http_request
from tests.support.servers import Server, live_server, serve
from tests.support.waiting import wait_until

SECONDS = 1
"""Longest pause of the server."""
EMBED = "/models/gpt/embed"
BODY = b'{"input_ids": [1]}'
CHUNKED = {"Transfer-Encoding": "chunked"}
EVENTS = {"Accept": "text/event-stream", "Content-Type": "application/json"}
LATE = b"\r\n\r\nthe request did not arrive in time"
WHOLE = http_request(EMBED, BODY)
HALF = {
    "tensors": WHOLE[:-3],
    "no byte of it": WHOLE[: -len(BODY)],
    "after another": WHOLE + WHOLE[:-3],
    "chunk": http_request(EMBED, b"12\r\n{", CHUNKED),
    "chunk size": http_request(EMBED, b"2\r\n{}\r\n1", CHUNKED),
    "trailers": http_request(EMBED, b"2\r\n{}\r\n0\r\nX-Sum: ", CHUNKED),
    "application": http_request("/v2/repository/index", b"{}")[:-1],
    "encoded": http_request(EMBED, BODY, {"Content-Encoding": "gzip"})[:-3],
    "events": http_request("/models/gpt/decode", BODY, EVENTS)[:-3],
}
"""Requests without the end of their body."""


@pytest.fixture(scope="module")
def hasty(tiny_repository: Path) -> Iterator[Server]:
    timeouts = "--body-timeout-seconds", str(SECONDS), "--header-timeout-seconds", "1"
    with serve(tiny_repository, *timeouts, "--max-concurrent-requests", "16") as running:
        yield running


def rest(stream: socket.socket) -> bytes:
    return b"".join(iter(lambda: stream.recv(2**16), b""))


def test_paused_body_gets_408_on_each_path(hasty: Server) -> None:
    with ExitStack() as stack:
        began = time.monotonic()
        streams = {name: stack.enter_context(dial(hasty.address)) for name in HALF}
        for name, stream in streams.items():
            stream.sendall(HALF[name])
        answers = {name: rest(stream) for name, stream in streams.items()}
        assert SECONDS - 0.1 < time.monotonic() - began < SECONDS + 5
    assert [name for name, answer in answers.items() if not answer.endswith(LATE)] == []
    assert {answer.count(b"HTTP/1.1 408 ") for answer in answers.values()} == {1}


def test_held_head_without_body_gets_408(hasty: Server) -> None:
    with RawConnection(hasty.address) as client:
        for _ in range(2):
            assert client.ask(WHOLE)[0] == 200
        client.send(WHOLE[: -len(BODY)])
        assert client.answer()[0] == 408


def test_trickled_bodies_are_closed(hasty: Server) -> None:
    """Each pause is short, and the answer is there before the last byte."""
    with ExitStack() as stack:
        streams = [stack.enter_context(dial(hasty.address)) for _ in range(3)]
        for stream, name in zip(streams, ("tensors", "chunk", "application"), strict=True):
            longer = HALF[name].replace(b"Content-Length: ", b"Content-Length: 9")
            stream.sendall(longer.replace(b"\r\n12\r\n", b"\r\nff\r\n"))
        end = time.monotonic() + 2 * SECONDS
        while time.monotonic() < end:
            time.sleep(0.1)
            for stream in streams:
                with suppress(ConnectionError):  # it has been refused
                    stream.sendall(b" ")
        for stream in streams:
            stream.setblocking(False)
            assert stream.recv(2**16).endswith(LATE)


def test_empty_line_does_not_start_header_timeout(hasty: Server) -> None:
    with RawConnection(hasty.address) as client:
        for _ in range(3):
            assert client.ask(WHOLE)[0] == 200
        client.send(b"\r\n", WHOLE)
        assert client.answer()[0] == 200
        time.sleep(1.5)
        assert client.ask(WHOLE)[0] == 200


def test_unread_body_of_answered_request_is_closed(hasty: Server) -> None:
    head = http_request("/livez", b"", {"Content-Length": "99"}, "GET")
    with dial(hasty.address) as stream:
        stream.sendall(head)
        answer = rest(stream)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"408" not in answer


def slow_parts(*headers: tuple[str, str]) -> list[bytes]:
    """Return a request in parts."""
    parts = [BODY[:-1], *[b" " * 2000] * 4, b"}"]
    if "Transfer-Encoding" in dict(headers):
        parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
        parts[-1] += b"0\r\n\r\n"
    whole = http_request(EMBED, b"".join(parts), {"Connection": "close", **dict(headers)})
    return [whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n", *parts]


def test_slow_uploads_are_answered(hasty: Server) -> None:
    """Each pause is short; on a busy machine one may become too long, and proves nothing."""
    requests = [slow_parts(), slow_parts(("Content-Encoding", "identity")), slow_parts(*CHUNKED.items())]

    def upload() -> list[bytes]:
        with ExitStack() as stack:
            streams = [stack.enter_context(dial(hasty.address)) for _ in requests]
            for parts in zip(*requests, strict=True):
                for stream, part in zip(streams, parts, strict=True):
                    with suppress(ConnectionError):
                        stream.sendall(part)
                time.sleep(0.3 * SECONDS)
            return [rest(stream)[:13] for stream in streams]

    assert any(upload() == [b"HTTP/1.1 200 "] * 3 for _ in range(5))


def test_lines_of_stream_may_pause(hasty: Server) -> None:
    """The size of a chunk, before a pause, is no incomplete head."""
    line = b'{"input_ids": [1]}\n'
    with RawConnection(hasty.address) as client:
        client.send(http_request("/models/gpt/decode", b"", {**CHUNKED, "Content-Type": "application/x-ndjson"}))
        client.send(b"%x\r\n" % len(line))
        time.sleep(2.2 * SECONDS)
        client.send(line + b"\r\n")
        while not (found := client.file.readline()).startswith(b"{"):
            assert found
        assert json.loads(found)["next_offset"] == [1]


def test_paused_bodies_leave_slots_to_others(hasty: Server) -> None:
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(dial(hasty.address)).sendall(HALF["chunk"])
        wait_until(lambda: httpx.post(hasty.address + EMBED, content=BODY).status_code == 503)
        wait_until(lambda: httpx.post(hasty.address + EMBED, content=BODY).status_code == 200)


@pytest.mark.parametrize("headers", [{}, EVENTS | CHUNKED], ids=["prepared", "events"])
def test_unloaded_model_answers_no_late_body(tiny_repository: Path, headers: dict[str, str]) -> None:
    path = "/models/gpt/decode" if headers.keys() & EVENTS.keys() else EMBED
    body = b"12\r\n%b\r\n0\r\n\r\n" % BODY if headers else BODY
    sent = http_request(path, body, headers)
    settings = Settings(repository=tiny_repository)
    engine = create_engine(settings)
    with live_server(configure(settings, create_app(settings, engine))) as port:
        address = f"http://127.0.0.1:{port}"
        with RawConnection(address) as known:
            assert known.ask(WHOLE)[0] == 200  # now it is prepared
        with dial(address) as stream:
            stream.sendall(sent[:-8])
            time.sleep(0.2)
            model = weakref.ref(engine.repository.find("gpt"))
            engine.repository.refresh({"bert"})
            gc.collect()
            assert model() is None
            stream.sendall(sent[-8:])
            assert stream.recv(2**16).startswith(b"HTTP/1.1 404 ")
