"""Retries. Every call is idempotent, and so is a step at a stated offset."""

import random
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from preblock.client.errors import ClientError, ServiceError, of_problem

T = TypeVar("T")

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 30.0
BUSY_STATUSES = (429, 503)


async def retry(attempt: Callable[[], Awaitable[T]], retries: int, sleep: Callable[[float], Awaitable[None]]) -> T:
    """Await `attempt()`, and again at most `retries` times after an error with a `retry_after`.

    Raises:
        ClientError: the last attempt failed, or a retry is useless.

    """
    for number in range(retries):
        try:
            return await attempt()
        except ClientError as error:
            seconds = pause(error, number)
            if seconds is None:
                raise
        await sleep(seconds)
    return await attempt()


def pause(error: ClientError, attempt: int) -> float | None:
    """Return the seconds to wait after the failure of `attempt`, counted from 0; None for no retry."""
    if error.retry_after is None or error.retry_after > MAX_PAUSE_SECONDS:
        return None
    # Jitter spreads the clients refused at the same moment.
    return error.retry_after + random.uniform(0, min(FIRST_PAUSE_SECONDS * 2**attempt, MAX_PAUSE_SECONDS))


def of_response(status: int, headers: Mapping[str, str], body: bytes | bytearray) -> ServiceError:
    """Return the error of an HTTP response; `headers` ignores the case of names."""
    error = of_problem(status, body)
    if status in BUSY_STATUSES:
        error.retry_after = _read_retry_after(headers.get("Retry-After", "0"))
    return error


def _read_retry_after(text: str) -> float:
    """Return the seconds of Retry-After (RFC 9110, section 10.2.3); 0 if `text` is neither seconds nor a date."""
    if text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return max(0.0, (date.astimezone(UTC) - datetime.now(UTC)).total_seconds())
