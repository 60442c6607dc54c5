"""When the same request is sent once more. Every call is pure, and so is a step at a stated offset: asked twice, it is
answered alike.
"""

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from preblock.client.errors import ConnectionFailed, NoAnswer, TimedOut
from preblock.client.requests import Call, Reply, T

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds. A service that asks for a longer pause in Retry-After is not asked again."""

BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, ConnectionFailed)
"""No connection, or one that ended before the answer did. What took too long is no such thing."""

BUSY = (429, 503)
"""Statuses that ask for patience."""

Outcome = Reply | httpx.HTTPError


def pause(outcome: Outcome | NoAnswer, attempt: int, retries: int) -> float | None:
    """Return the seconds to wait before the request is sent again; None where it is not.

    `attempt` counts from 0; at most `retries` follow the first.
    """
    if attempt >= retries:
        return None
    if isinstance(outcome, Exception):
        asked = 0.0 if isinstance(outcome, BROKEN) else None
    else:
        asked = _retry_after(outcome.headers) if outcome.status in BUSY else None
    if asked is None or asked > LONGEST_PAUSE:
        return None
    # Jitter, so that clients who were refused together do not come back together.
    return asked + random.uniform(0, min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE))


def result_of(call: Call[T], outcome: Outcome) -> T:
    """Return what the last answer says.

    Raises:
        ServiceError: it is an error.
        NoAnswer: there is none.

    """
    if isinstance(outcome, Reply):
        return call.result(outcome)
    raise failure(outcome) from outcome


def failure(error: Exception) -> NoAnswer:
    """Return the error for an answer that did not come."""
    kind = TimedOut if isinstance(error, httpx.TimeoutException | TimeoutError) else ConnectionFailed
    return kind(f"{type(error).__name__}: {error}")


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that Retry-After asks for (RFC 9110, section 10.2.3); 0 where it asks for nothing."""
    text = headers.get("Retry-After", "0")
    if text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return max(0.0, (date.astimezone(UTC) - datetime.now(UTC)).total_seconds())
