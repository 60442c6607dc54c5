"""The pauses between retries, and the errors that state one."""

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from numbers import Integral
from typing import Any

from preblock.client.errors import ClientError, ServiceError, invalid, of_problem

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 30.0
BUSY_STATUSES = (429, 503)
PROXY_STATUSES = (500, 502)
"""A proxy answers so if its server dies during a request: HAProxy and nginx with 502, Ray Serve with 500."""


def read_retries(retries: Any) -> int:
    """Return the number of further attempts; raise RequestError unless it is a whole number from 0 on."""
    if not isinstance(retries, Integral) or int(retries) < 0:
        raise invalid("retries", repr(retries), "a whole number from 0 on")
    return int(retries)


def pause(error: ClientError, attempt: int) -> float | None:
    """Return the seconds to wait after the failure of `attempt`, counted from 0; None for no retry."""
    if error.retry_after is None or error.retry_after > MAX_PAUSE_SECONDS:
        return None
    # Jitter spreads the clients refused at the same moment.
    return error.retry_after + random.uniform(0, min(FIRST_PAUSE_SECONDS * 2**attempt, MAX_PAUSE_SECONDS))


def of_response(status: int, headers: Mapping[str, str], body: bytes | bytearray) -> ServiceError:
    """Return the error of an HTTP response; `headers` ignores the case of names."""
    error = of_problem(status, body)
    # Every error of the service has a `type`, or in the Open Inference Protocol an `error`.
    from_proxy = error.problem.keys().isdisjoint(("type", "error"))
    if status in BUSY_STATUSES or (status in PROXY_STATUSES and from_proxy):
        error.retry_after = _read_retry_after(headers.get("Retry-After", "0"))
    return error


def of_stream(document: bytes) -> ServiceError:
    """Return the error of a message of a decode stream. A frame has no headers: the document states `retry_after`."""
    error = of_problem(0, document)
    seconds = error.problem.get("retry_after")
    if isinstance(seconds, int | float) and seconds >= 0:
        error.retry_after = float(seconds)
    return error


def _read_retry_after(text: str) -> float:
    """Return the seconds of Retry-After (RFC 9110, section 10.2.3); 0 if `text` is neither seconds nor a date."""
    if text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return 0.0
    # A date without a zone is one of UTC. In UTC, a date of another zone may lie beyond the year 9999.
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
