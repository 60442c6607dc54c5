"""Owners of connections: a process, and with asyncio an event loop. After a fork, two processes share each socket."""

import asyncio
import os
from asyncio import AbstractEventLoop

AsyncOwner = tuple[int, AbstractEventLoop]


def async_owner() -> AsyncOwner:
    """Return the running process and event loop: they alone may use a connection opened now."""
    return os.getpid(), asyncio.get_running_loop()
