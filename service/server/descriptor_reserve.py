"""Keeps descriptors free: connections that wait for their clients make room for new ones.

Without a free descriptor the process could accept no client, and open no file.
"""

import asyncio
import logging
import resource
import sys
import time
from abc import ABC, abstractmethod
from heapq import nsmallest
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)
RESERVED_DESCRIPTORS = 16
"""For files, such as those of a new version, and for connections that arrive in one iteration of the event loop."""
ROOM = 16
"""One of so many descriptors becomes free at a time, because a search for each would cost time."""
OPEN_DESCRIPTORS = Path("/dev/fd")
NEW_SECONDS = 1.0
"""A client sends its request soon after it connects."""
LOG_INTERVAL_SECONDS = 60.0


class WaitingConnection(asyncio.Protocol, ABC):
    """A connection that may wait for its client."""

    @abstractmethod
    def waits_since(self) -> tuple[bool, float] | None:
        """Return whether the connection is idle, and since when; None if it does not wait for its client."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once."""


class DescriptorReserve:
    """Closes waiting connections while few descriptors are free.

    Connections with incomplete requests or handshakes are closed first, then idle ones, then those with input in the
    last second. In each group the longest wait ends first.

    Args:
        loop: of the connections.
        connections: the open connections of the server, a set that changes.

    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: set[Any]) -> None:
        self._loop, self._connections = loop, connections
        self._most_open = 0  # since the last count: connections may have been closed
        self._is_scheduled = False
        self._logged = float("-inf")

    def admit(self, descriptor: int) -> None:
        """Take note of a new connection, and make room for the next one if few descriptors are free.

        The system assigns the lowest free descriptor, so at least as many are in use as its number.
        """
        self._most_open = max(self._most_open + 1, descriptor)
        if self._most_open >= _allowed() and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._make_room)

    def _make_room(self) -> None:
        self._is_scheduled = False
        allowed = _allowed()
        try:
            self._most_open = sum(1 for _ in OPEN_DESCRIPTORS.iterdir())
        except OSError:  # none is free
            self._most_open = allowed + RESERVED_DESCRIPTORS
        if self._most_open < allowed:
            return
        waiting = self._waiting()
        count = self._most_open - allowed + allowed // ROOM + 1
        for *_, connection in nsmallest(min(count, len(waiting) - 1), waiting):  # never the newest
            connection.abort()
        now = time.monotonic()
        if now - self._logged >= LOG_INTERVAL_SECONDS:
            self._logged = now
            LOG.warning(
                "%d descriptors are in use, near the limit: connections without a complete request make room for new "
                "ones; raise the limit (ulimit -n)",
                self._most_open,
            )

    def _waiting(self) -> list[tuple[bool, bool, float, int, WaitingConnection]]:
        """Return the waiting connections, with their places in the order of closing."""
        new, found = self._loop.time() - NEW_SECONDS, []
        for connection in self._connections:
            rank = connection.waits_since() if isinstance(connection, WaitingConnection) else None
            if rank is not None:
                found.append((rank[1] > new, *rank, id(connection), connection))
        return found


def _allowed() -> int:
    """Return the number of descriptors from which on connections make room."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(limit - RESERVED_DESCRIPTORS, 0)
