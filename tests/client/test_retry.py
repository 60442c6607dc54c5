"""Retries through a failing proxy."""

import asyncio
import email.utils
import time

import httpx
import pytest

import preblock
from preblock.client import errors
from preblock.client.access import read_replicas
from preblock.client.errors import ClientError
from preblock.client.retry import MAX_PAUSE_SECONDS, of_response, pause
from preblock.client.transport import AsyncTransport
from tests.client.conftest import Connect, raises_kind
from tests.client.flaky_proxy import CUT, DROP, STALL, SWALLOW, FlakyProxy, canned

BUSY = canned("503 Service Unavailable", b'{"type":"urn:preblock:error:Unavailable","detail":"full"}')


def busy(after: str | None = None) -> ClientError:
    headers = {} if after is None else {"retry-after": after}
    return of_response(503, httpx.Headers(headers), b"")


@pytest.mark.parametrize(
    "act",
    [
        DROP,
        SWALLOW,
        CUT,
        BUSY,
        canned("503 Service Unavailable"),
        canned("429 Too Many Requests"),
        canned("502 Bad Gateway", b"<html>"),
        canned("500 Internal Server Error", b"Internal Server Error"),
        canned("500 Internal Server Error", b'{"message": "from a gateway"}'),
    ],
    ids=range(9),
)
def test_failed_call_is_retried_until_success(connect: Connect, flaky: FlakyProxy, act: str | bytes) -> None:
    flaky.script = [act, act]
    result = connect(flaky.address, retries=2).embed([1, 2], model="gpt")
    assert result.vectors.shape == (1, 2, 4)
    assert flaky.connections == 3


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (DROP, "ConnectionFailed"),
        (SWALLOW, "ConnectionFailed"),
        (CUT, "ConnectionFailed"),
        (BUSY, "Unavailable"),
        (canned("429 Too Many Requests", b"<html>"), "RateLimited"),
        (canned("502 Bad Gateway", b"<html>"), "status 502"),
    ],
)
def test_retries_stop_at_limit(connect: Connect, flaky: FlakyProxy, act: str | bytes, kind: str) -> None:
    flaky.script = [act] * 3
    with raises_kind(kind):
        connect(flaky.address, retries=1).models()
    assert flaky.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        canned("400 Bad Request", b'{"type":"urn:preblock:error:Malformed","detail":"x"}'),
        canned("500 Internal Server Error", b'{"type":"about:blank","detail":"x"}'),
        canned("500 Internal Server Error", b'{"error":"x"}'),
        canned("504 Gateway Timeout", b"<html>"),
        canned("301 Moved Permanently", b"", "Location: http://127.0.0.1:1/"),
        canned("200 OK", b"<html>hello</html>"),
        canned("200 OK", b"[1]"),
        canned("503 Service Unavailable", b"", "Retry-After: 31"),
    ],
    ids=range(8),
)
def test_other_responses_are_not_retried(connect: Connect, flaky: FlakyProxy, answer: bytes) -> None:
    flaky.script = [answer] * 2
    with pytest.raises(errors.ServiceError) as raised:
        connect(flaky.address).models()
    assert isinstance(raised.value, errors.RequestError) == answer.startswith(b"HTTP/1.1 4")
    assert flaky.connections == 1


def test_retry_after_is_respected(connect: Connect, flaky: FlakyProxy) -> None:
    flaky.script = [canned("503 Service Unavailable", b"", "Retry-After: 1")]
    start = time.monotonic()
    assert len(connect(flaky.address, retries=1).models()) == 2
    assert time.monotonic() - start >= 1


def test_timed_out_call_is_not_retried(connect: Connect, flaky: FlakyProxy) -> None:
    flaky.script = [STALL] * 2
    start = time.monotonic()
    with pytest.raises(errors.TimedOut):
        connect(flaky.address, timeout=0.2).embed([1], model="gpt")
    assert time.monotonic() - start < 5
    assert flaky.connections == 1


def test_cancelled_call_leaves_client_usable(flaky: FlakyProxy) -> None:
    async def cancel() -> None:
        flaky.script = [STALL]
        async with preblock.connect_async(flaky.address) as client:
            call = asyncio.create_task(client.embed([1], model="gpt"))
            while not flaky.connections:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await client.embed([1], model="gpt")).vectors.shape == (1, 1, 4)

    asyncio.run(cancel())


@pytest.mark.parametrize(
    ("error", "least", "most"),
    [
        (busy(), 0, 0.25),
        (busy("7"), 7, 7.25),
        (busy("soon"), 0, 0.25),
        (busy(email.utils.formatdate(time.time() + 3600, usegmt=True)), None, None),
        (busy(email.utils.formatdate(time.time() - 3600, usegmt=True)), 0, 0.25),
        (busy("31"), None, None),
        (busy("Thu, 31 Dec 9999 23:59:59 -2359"), None, None),
        (busy("Mon, 01 Jan 0001 00:00:00 +2359"), 0, 0.25),
        (busy("Thu, 31 Dec 9999 23:59:59 -0000"), None, None),
        (busy("Mon, 01 Jan 99999999999999999999 00:00:00 GMT"), 0, 0.25),
        (errors.ConnectionFailed("x"), 0, 0.25),
        (errors.TimedOut("x"), None, None),
        (errors.StreamClosed("x", []), None, None),
        (of_response(500, {"Retry-After": "1"}, b""), 1, 1.25),
        (of_response(500, {"Retry-After": "1"}, b'{"type": "about:blank"}'), None, None),
    ],
)
def test_pause_before_retry_has_jitter_within_limits(
    error: ClientError, least: float | None, most: float | None
) -> None:
    found = [pause(error, 0) for _ in range(100)]
    if least is None or most is None:
        assert set(found) == {None}
    else:
        pauses = [seconds for seconds in found if seconds is not None]
        assert len(pauses) == 100
        assert least <= min(pauses) < max(pauses) <= most
        assert max(pauses) - min(pauses) > (most - least) / 2  # not all at once


@pytest.mark.parametrize(
    ("failure", "kind", "retry_after"),
    [
        (httpx.ConnectError("x"), errors.ConnectionFailed, 0),
        (httpx.RemoteProtocolError("x"), errors.ConnectionFailed, 0),
        (httpx.ReadTimeout("x"), errors.TimedOut, None),
        (httpx.ConnectTimeout("x"), errors.TimedOut, None),
        (httpx.UnsupportedProtocol("x"), errors.ConnectionFailed, None),
    ],
)
def test_only_failed_connections_are_retried(
    failure: httpx.HTTPError, kind: type[ClientError], retry_after: float | None
) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise failure

    async def request() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(fail)) as http_client:
            transport = AsyncTransport(read_replicas("http://me:secret@host/under/", 1, None), http_client)
            with pytest.raises(kind, match=r"http://host/under ") as raised:
                await transport.request("GET", "/", b"", {})
        assert (type(raised.value), raised.value.retry_after) == (kind, retry_after)

    asyncio.run(request())


def test_retry_pauses_grow_to_limit() -> None:
    longest = [max(pause(busy(), attempt) or 0 for _ in range(200)) for attempt in range(12)]
    assert all(limit / 2 < seconds <= limit for limit, seconds in zip((0.25, 0.5, 1, 2, 4), longest, strict=False))
    assert longest[-1] <= MAX_PAUSE_SECONDS
