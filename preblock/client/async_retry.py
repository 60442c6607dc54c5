"""The loop of retries. Every call is idempotent, and so is a step at a stated offset."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from preblock.client.errors import ClientError
from preblock.client.retry import pause

T = TypeVar("T")


async def retry(attempt: Callable[[], Awaitable[T]], retries: int, sleep: Callable[[float], Awaitable[None]]) -> T:
    """Call `attempt()`, and again at most `retries` times after an error with a `retry_after`.

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
