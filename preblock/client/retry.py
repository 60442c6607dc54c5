"""Retries. Every call is idempotent, and so is a step at a stated offset."""

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from preblock.client.api import ApiRequest, HttpResponse, T
from preblock.client.errors import ConnectionFailed, NoAnswer, TimedOut

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds. There is no retry if Retry-After asks for a longer pause."""

BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, ConnectionFailed)
"""The connection failed, or ended before the answer did. A timeout is not among these: it is not retried."""

BUSY = (429, 503)
"""Statuses to retry."""

Outcome = HttpResponse | httpx.HTTPError


def pause(outcome: Outcome | NoAnswer, attempt: int, retries: int) -> float | None:
    """Return the seconds to wait before the next attempt; None for no further attempt.

    `attempt` counts from 0; at most `retries` follow the first.
    """
    if attempt >= retries:
        return None
    if isinstance(outcome, Exception):
        delay = 0.0 if isinstance(outcome, BROKEN) else None
    else:
        delay = _retry_after(outcome.headers) if outcome.status in BUSY else None
    if delay is None or delay > LONGEST_PAUSE:
        return None
    # Jitter spreads the clients refused at the same moment.
    return delay + random.uniform(0, min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE))


def result_of(call: ApiRequest[T], outcome: Outcome) -> T:
    """Return the result of the last attempt.

    Raises:
        ServiceError: the service answered with an error.
        NoAnswer: no answer came.

    """
    if isinstance(outcome, HttpResponse):
        return call.result(outcome)
    raise failure(outcome) from outcome


def failure(error: Exception) -> NoAnswer:
    """Return the client's error for a failed connection or a timeout."""
    kind = TimedOut if isinstance(error, httpx.TimeoutException | TimeoutError) else ConnectionFailed
    return kind(f"{type(error).__name__}: {error}")


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of Retry-After (RFC 9110, section 10.2.3); 0 without a readable one."""
    text = headers.get("Retry-After", "0")
    if text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return max(0.0, (date.astimezone(UTC) - datetime.now(UTC)).total_seconds())
