"""Synchronous classes made from classes with coroutine methods.

Over a synchronous transport or socket no coroutine suspends, so `finish` runs it to its end at once.
"""

import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


class Blocking(Generic[A]):
    """A synchronous class; `_wrapped` has the coroutine methods."""

    def __init__(self, wrapped: A) -> None:
        self._wrapped = wrapped


def blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Blocking[A], P], T]:
    """Return a synchronous method with the name, the docstring and the signature of `method`."""

    @wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return finish(method(self._wrapped, *args, **kwargs))

    return call


async def sleep(seconds: float) -> None:
    """Block for some seconds, without suspension."""
    time.sleep(seconds)


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine without suspension, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise RuntimeError("a coroutine of a synchronous client was suspended")
