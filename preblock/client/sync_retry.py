"""The loop of retries. Every call is idempotent, and so is a step at a stated offset."""

from collections.abc import Callable
from typing import TypeVar

from preblock.client.errors import ClientError
from preblock.client.retry import pause

T = TypeVar("T")


def retry(attempt: Callable[[], T], retries: int, sleep: Callable[[float], None]) -> T:
    """Call `attempt()`, and again at most `retries` times after an error with a `retry_after`.

    Raises:
        ClientError: the last attempt failed, or a retry is useless.

    """
    for number in range(retries):
        try:
            return attempt()
        except ClientError as error:
            seconds = pause(error, number)
            if seconds is None:
                raise
        sleep(seconds)
    return attempt()
