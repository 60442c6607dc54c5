"""The effects of a decode stream, to be carried out by its connection, and their outcomes."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from preblock.client.errors import NoAnswer
from preblock.client.requests import HttpResponse

T = TypeVar("T")


@dataclass(frozen=True)
class Connect:
    """Connect to `path` at the server, and close the connection before it."""

    path: str


@dataclass(frozen=True)
class Exchange:
    """Send a message, and wait for the answer."""

    message: str | bytes


@dataclass(frozen=True)
class Pause:
    """Wait."""

    seconds: float


Effect = Connect | Exchange | Pause
Outcome = bytes | None | HttpResponse | NoAnswer
"""A message, nothing, an HTTP response instead of a WebSocket, or no answer."""
Effects = Generator[Effect, Outcome, T]
