"""Errors of the service, as neutral kinds. Each protocol maps the kinds to its own codes once.

    PreblockError
    ├── ClientFault             the request is at fault; a retry fails again
    │   ├── Malformed           bytes with invalid syntax for their format
    │   ├── Invalid             a value out of range or of the wrong type
    │   ├── Unauthenticated     a missing or unknown key
    │   ├── NotFound            an unknown model or version
    │   ├── Forbidden           an action outside the rights of the key or the settings
    │   ├── Misdirected         a request to a host name that the service does not answer to
    │   ├── Conflict            a mismatch of the expected and the actual stream state
    │   ├── TooLarge            a size over a limit
    │   ├── RateLimited         too many requests of a caller
    │   ├── UnsupportedFormat   an unsupported request format
    │   └── NotAcceptable       an unsupported response format
    └── ServerFault             the service fails; the request may be valid
        ├── Unavailable         starting, shutting down, or overloaded
        ├── ArtifactError       a broken or unsupported artifact
        └── ProviderError       an unusable execution provider

Every error names three things: the field, the value got, the value expected. If items of a list are at fault, the error
is about the first one, and lists the others.
"""

import asyncio
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any, TypeVar

MAX_VALUE_CHARS = 80
"""Maximum characters of a value in a message: enough to recognize it, too few to reflect a whole body."""

MAX_BAD_INDICES = 100
"""Most items of a list that an error names."""

ENDS = asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit
"""Exceptions that end work and are no failure. A panic of a library in Rust is a failure, and no `Exception`."""

INTERNAL_ERROR_MESSAGE = "internal error; the log of the service has the details"
"""The message of any other exception: nothing about the internals."""


T = TypeVar("T")


# Lists may be nested too deeply for `repr`, and the text of a long list would cost more than the request.
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxtuple = 4, 16, 16, 16
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = MAX_VALUE_CHARS


def shorten(value: object) -> str:
    """Return `value` as text for a message, of at most `MAX_VALUE_CHARS` characters."""
    text = value if isinstance(value, str) else _REPR.repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"


class PreblockError(Exception):
    """An error with the field, the value got and the value expected.

    Args:
        field: name of the field, header, setting or file.
        got: the rejected value; shortened to `MAX_VALUE_CHARS` characters.
        expected: the accepted values.
        message: the whole sentence, for errors about something other than a value; default: "FIELD: got …, expected …".
        items: ascending indices of all items at fault, in a list of rows, texts or values; empty without such a list.
        hint: how the value can become an accepted one, after the default message; default: nothing.

    """

    retry_after: int | None = None
    """Seconds until a retry may succeed; None if it cannot."""

    def __init__(
        self,
        field: str,
        got: object,
        expected: str,
        *,
        message: str | None = None,
        items: Collection[Any] = (),
        hint: str = "",
    ) -> None:
        self.field = field
        self.got = shorten(got)
        self.expected = expected
        self.items, self.hint = items, hint
        end = f"; {hint}" if hint else ""
        super().__init__(message or f"{field}: got {self.got}, expected {expected}{end}")

    def __str__(self) -> str:
        """Return the message, with the indices of several bad items."""
        return super().__str__() + self.items_text

    @property
    def bad_indices(self) -> list[int]:
        """Indices of the first items at fault, at most `MAX_BAD_INDICES`."""
        return list(map(int, islice(self.items, MAX_BAD_INDICES)))

    @property
    def items_text(self) -> str:
        """The end of the message, about several items at fault; else empty."""
        if len(self.items) < 2:
            return ""
        more = ", …" if len(self.items) > MAX_BAD_INDICES else ""
        return f"; {len(self.items)} bad items: {', '.join(map(str, self.bad_indices))}{more}"

    @property
    def item_fields(self) -> dict[str, Any]:
        """The fields of an error body about the items at fault; none without such items."""
        return {"bad_indices": self.bad_indices, "bad_count": len(self.items)} if len(self.items) else {}


class ClientFault(PreblockError):
    """The request is at fault; a retry fails again."""


class Malformed(ClientFault):
    """The bytes have invalid syntax for their format."""


class Invalid(ClientFault):
    """A value is out of range or of the wrong type."""


class Unauthenticated(ClientFault):
    """The key is missing or unknown."""


class NotFound(ClientFault):
    """The model or version does not exist."""


class Forbidden(ClientFault):
    """The key or the settings do not allow the action."""


class Misdirected(ClientFault):
    """The service does not answer to the host in the request."""


class Conflict(ClientFault):
    """The state of a stream differs from the state expected by the client."""


class TooLarge(ClientFault):
    """A size is over a limit."""


class RateLimited(ClientFault):
    """The caller sends too many requests; a retry succeeds after `retry_after` seconds."""

    retry_after = 1


class UnsupportedFormat(ClientFault):
    """The request format is unsupported."""


class NotAcceptable(ClientFault):
    """The response format is unsupported."""


class ServerFault(PreblockError):
    """The service cannot answer the request; the request may be valid."""


class Unavailable(ServerFault):
    """The service is starting, shutting down, or overloaded; a retry may succeed."""

    retry_after = 1


class ArtifactError(ServerFault):
    """An artifact is broken or unsupported."""


class ProviderError(ServerFault):
    """An execution provider cannot be used."""


def read_items(items: Iterable[Any], read: Callable[[int, Any], T]) -> list[T]:
    """Return `read` of the index and the value of each item.

    Raises:
        Invalid: the first error of `read`, with the indices of all items that it refuses.

    """
    found: list[T] = []
    first: Invalid | None = None
    bad: list[int] = []
    for index, item in enumerate(items):
        try:
            found.append(read(index, item))
        except Invalid as error:
            first = first or error
            bad.append(index)
    if first is None:
        return found
    first.items = bad
    try:
        raise first
    finally:
        del first  # its traceback holds this frame, and such a cycle would keep the items


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dictionary; raise ValueError for a repeated name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name} twice")
    return found
