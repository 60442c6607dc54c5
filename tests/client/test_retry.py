"""Failed calls and openings of streams: which are repeated, when, and where; and how long each may last."""

import email.utils
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import httpx
import numpy as np
import pytest

from preblock.client import errors
from preblock.client.errors import ClientError
from preblock.client.retry import MAX_PAUSE_SECONDS, of_response, pause
from tests.client.conftest import Connect, raises_kind, whole
from tests.client.flaky_proxy import CUT, DROP, STALL, SWALLOW, Act, FlakyProxy, canned
from tests.support.servers import Server, free_port, serve_replicas

Exchange = Callable[[Any], Any]
BUSY = canned("503 Service Unavailable", b'{"type":"urn:preblock:error:Unavailable","detail":"full"}')
ROWS = 1_500_000
"""A message of so many ids is larger than the buffers of a connection, and smaller than the service allows."""
REPEATED: list[tuple[Act, str]] = [
    (DROP, "ConnectionFailed"),
    (SWALLOW, "ConnectionFailed"),
    (CUT, "ConnectionFailed"),
    (BUSY, "Unavailable"),
    (canned("503 Service Unavailable"), "Unavailable"),
    (canned("429 Too Many Requests", b"<html>"), "RateLimited"),
    (canned("502 Bad Gateway", b"<html>"), "status 502"),
    (canned("500 Internal Server Error", b"Internal Server Error"), "status 500"),
    (canned("500 Internal Server Error", b'{"message": "from a gateway"}'), "status 500"),
]
FINAL: list[tuple[Act, str]] = [
    (STALL, "TimedOut"),
    (canned("400 Bad Request", b'{"type":"urn:preblock:error:Malformed","detail":"x"}'), "Malformed"),
    (canned("404 Not Found"), "status 404"),
    (canned("500 Internal Server Error", b'{"type":"about:blank","detail":"x"}'), "status 500"),
    (canned("500 Internal Server Error", b'{"error":"x"}'), "status 500"),
    (canned("504 Gateway Timeout", b"<html>"), "status 504"),
    (canned("200 OK", b"<html>of another server</html>"), "status 200"),
    (canned("200 OK", b"[1]"), "status 200"),
    (canned("503 Service Unavailable", b"", "Retry-After: 31"), "Unavailable"),
]


@pytest.mark.parametrize(("act", "kind"), [*REPEATED, *FINAL], ids=range(len([*REPEATED, *FINAL])))
def test_attempt_is_repeated_where_that_may_help(
    connect: Connect, exchange: Exchange, flaky: FlakyProxy, act: Act, kind: str
) -> None:
    attempts = 2 if (act, kind) in REPEATED else 1
    client = connect(flaky.address, retries=1, timeout=0.3 if act == STALL else 30)
    flaky.script = [act] * (attempts + 1)
    with raises_kind(kind) as raised:
        exchange(client)
    assert flaky.connections == attempts
    assert isinstance(raised.value, errors.RequestError) == (kind in ("RateLimited", "Malformed", "status 404"))
    assert not isinstance(raised.value, errors.NoAnswer) or flaky.address in str(raised.value)
    if attempts == 2:
        assert exchange(client).shape == (1, 2, 4)
        assert flaky.connections == 4


def test_retry_after_is_respected(connect: Connect, flaky: FlakyProxy) -> None:
    flaky.script = [canned("503 Service Unavailable", b"", "Retry-After: 1")]
    start = time.monotonic()
    assert len(connect(flaky.address, retries=1).models()) == 2
    assert time.monotonic() - start >= 1


def test_redirected_call_is_not_sent_to_another_server(connect: Connect, flaky: FlakyProxy) -> None:
    flaky.script = [canned("301 Moved Permanently", b"", "Location: http://127.0.0.1:1/")] * 2
    with raises_kind("status 301"):
        connect(flaky.address, retries=1).models()
    assert flaky.connections == 1


def busy(after: str | None = None) -> ClientError:
    headers = {} if after is None else {"retry-after": after}
    return of_response(503, httpx.Headers(headers), b"")


@pytest.mark.parametrize(
    ("error", "least"),
    [
        (busy(), 0),
        (busy("7"), 7),
        (busy("soon"), 0),
        (busy(email.utils.formatdate(time.time() + 3600, usegmt=True)), None),
        (busy("31"), None),
        (busy("Thu, 31 Dec 9999 23:59:59 -2359"), None),
        (busy("Mon, 01 Jan 0001 00:00:00 +2359"), 0),
        (busy("Thu, 31 Dec 9999 23:59:59 -0000"), None),
        (busy("Mon, 01 Jan 99999999999999999999 00:00:00 GMT"), 0),
        (errors.StreamClosed("x", []), None),
        (of_response(500, {"Retry-After": "1"}, b""), 1),
        (of_response(500, {"Retry-After": "1"}, b'{"type": "about:blank"}'), None),
    ],
)
def test_pause_before_retry_has_jitter_within_limits(error: ClientError, least: float | None) -> None:
    found = [pause(error, 0) for _ in range(100)]
    if least is None:
        assert set(found) == {None}
    else:
        pauses = [seconds for seconds in found if seconds is not None]
        assert len(pauses) == 100
        assert least <= min(pauses) < max(pauses) <= least + 0.25
        assert max(pauses) - min(pauses) > 0.125  # not all at once


def test_retry_pauses_grow_to_limit() -> None:
    longest = [max(pause(busy(), attempt) or 0 for _ in range(200)) for attempt in range(12)]
    assert all(limit / 2 < seconds <= limit for limit, seconds in zip((0.25, 0.5, 1, 2, 4), longest, strict=False))
    assert longest[-1] <= MAX_PAUSE_SECONDS


@pytest.mark.parametrize(
    "act", [None, BUSY, canned("429 Too Many Requests"), canned("502 Bad Gateway"), STALL], ids=range(5)
)
def test_client_turns_to_another_server_and_stays(
    connect: Connect, exchange: Exchange, tiny_server: Server, flaky: FlakyProxy, act: Act | None
) -> None:
    """Without an act there is no server at the address. A timeout is not repeated, but the next call goes elsewhere."""
    flaky.script = [act] * 9 if act else []
    failing = flaky.address if act else f"http://127.0.0.1:{free_port()}"
    for addresses in ([failing, tiny_server.address], [tiny_server.address, failing]):
        random.seed(0)  # both clients begin at the same place, so one of them at the failing server
        client = connect(addresses, retries=1, timeout=0.3 if act == STALL else 30)
        with suppress(errors.TimedOut):
            exchange(client)
        for _ in range(2):
            assert exchange(client).shape == (1, 2, 4)
    assert flaky.connections == (act is not None)


@pytest.fixture
def replicas(tiny_repository: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start three servers; a test may end them."""
    with serve_replicas(tiny_repository, 3) as started:
        yield started


def serves_a_stream(address: str) -> bool:
    return "\npreblock_streams_open 1" in httpx.get(f"{address}/metrics", timeout=60).text


def test_stream_resumes_on_other_server_at_its_offset(
    connect: Connect, replicas: dict[str, subprocess.Popen[str]]
) -> None:
    tokens, ends = [1, 2, 3, 4, 5, 6], [subprocess.Popen.kill, subprocess.Popen.terminate]
    client = connect([*replicas], retries=3)
    expected = whole(client, tokens, model="gpt")
    with client.decode("gpt", resume=True) as stream:
        for place, token in enumerate(tokens):
            assert np.array_equal(stream.step([token]), expected[:, place : place + 1])
            if ends:
                (used,) = filter(serves_a_stream, replicas)
                process = replicas.pop(used)
                ends.pop()(process)
                process.wait()
    assert len(replicas) == 1
    assert np.array_equal(whole(client, tokens, model="gpt"), expected)


@pytest.mark.parametrize("tokens", [1, ROWS], ids=["read", "write"])
@pytest.mark.parametrize("kind", ["call", "step"])
def test_exchange_and_close_end_in_time(connect: Connect, flaky: FlakyProxy, kind: str, tokens: int) -> None:
    """The server answers a small message never, and reads a large one in part."""
    send, close = open_line(connect(flaky.address, timeout=0.5, retries=0), kind)
    flaky.hold()
    flaky.hold_requests()
    began = time.monotonic()
    with raises_kind("TimedOut" if kind == "call" else "StreamClosed", match=flaky.address):
        send(tokens)
    assert 0.4 < time.monotonic() - began < 10
    close()
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("kind", ["call", "step"])
def test_write_and_read_have_a_timeout_each(connect: Connect, flaky: FlakyProxy, kind: str) -> None:
    send, _ = open_line(connect(flaky.address, timeout=2), kind)
    flaky.hold()
    flaky.hold_requests()
    for seconds, release in ((1.2, flaky.release_requests), (2.4, flaky.release)):
        Timer(seconds, release).start()
    began = time.monotonic()
    with pytest.raises(errors.RequestError):  # its answer
        send(ROWS)
    assert time.monotonic() - began > 2.3


@pytest.mark.parametrize("kind", ["call", "step"])
def test_idle_connection_has_no_timeout(connect: Connect, flaky: FlakyProxy, kind: str) -> None:
    send, _ = open_line(connect(flaky.address, timeout=0.5), kind)
    time.sleep(1)
    send(1)
    assert flaky.connections == 1


def open_line(client: Any, kind: str) -> tuple[Callable[[int], Any], Callable[[], None]]:
    """Connect, and return functions to send zeros as ids, by a call or by a step of a stream, and to close."""
    if kind == "call":
        client.models()
        return lambda tokens: client.embed(np.zeros((1, tokens), int), model="gpt"), client.close
    stream = client.decode("gpt")
    stream.ping()
    return lambda tokens: stream.step(np.zeros((1, tokens), int)), stream.close
