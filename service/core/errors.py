"""Errors that the service raises on purpose, as neutral kinds. Each protocol maps the kinds to its own codes once.

    PreblockError
    ├── ClientFault             the request is at fault; the same request fails again
    │   ├── Malformed           bytes that cannot be read as what they claim to be
    │   ├── Invalid             readable, but a value is not allowed
    │   ├── Unauthenticated     no key that is known, where one is needed
    │   ├── NotFound            no such model or version
    │   ├── Forbidden           what the settings, or the key, do not allow
    │   ├── Conflict            the client's idea of a stream is not its state
    │   ├── TooLarge            over a limit of size
    │   ├── RateLimited             over a limit of how often a caller may ask
    │   ├── UnsupportedFormat   a request format that is not read
    │   └── NotAcceptable       an answer format that is not written
    └── ServerFault             the request may be fine
        ├── Unavailable         not ready, shutting down, or too busy
        ├── ArtifactError       an artifact that is broken or not understood
        └── ProviderError       an execution provider that cannot be used

Every error names three things: the field, the value got, the value allowed.
"""

import reprlib

LONGEST_VALUE = 80
"""Most characters of a value in a message: enough to recognise it, too few to reflect a whole body."""

INTERNAL_ERROR_MESSAGE = "the service failed in an unforeseen way; its log says how"
"""The message of any other exception: nothing about the internals."""


# Lists may be nested deeper than `repr` can follow, and so long that their text costs more than the request.
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxtuple = 4, 16, 16, 16
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = LONGEST_VALUE


class PreblockError(Exception):
    """An error that names the field, the value got and the value allowed."""

    retry_after: int | None = None
    """Seconds after which the same request may succeed; None where it will not."""

    def __init__(self, field: str, got: object, allowed: str) -> None:
        text = got if isinstance(got, str) else _REPR.repr(got)
        self.field = field
        self.got = text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "…"
        self.allowed = allowed
        super().__init__(f"{field}: got {self.got}, allowed {allowed}")


class ClientFault(PreblockError):
    """The request is at fault; the same request fails again."""


class Malformed(ClientFault):
    """Bytes that cannot be read as what they claim to be."""


class Invalid(ClientFault):
    """Readable, but a value is not allowed."""


class Unauthenticated(ClientFault):
    """No key that is known, where one is needed."""


class NotFound(ClientFault):
    """No such model or version."""


class Forbidden(ClientFault):
    """What the settings, or the key, do not allow."""


class Conflict(ClientFault):
    """What the client takes for the state of a stream is not its state."""


class TooLarge(ClientFault):
    """Over a limit of size."""


class RateLimited(ClientFault):
    """Over a limit of how often a caller may ask; the same request succeeds `retry_after` seconds later."""

    def __init__(self, field: str, got: object, allowed: str, retry_after: int = 1) -> None:
        super().__init__(field, got, allowed)
        self.retry_after = retry_after


class UnsupportedFormat(ClientFault):
    """A request format that is not read."""


class NotAcceptable(ClientFault):
    """An answer format that is not written."""


class ServerFault(PreblockError):
    """The request may be fine; the service cannot answer it."""


class Unavailable(ServerFault):
    """Not ready, shutting down, or too busy; the same request may succeed later."""

    retry_after = 1


class ArtifactError(ServerFault):
    """An artifact that is broken or not understood."""


class ProviderError(ServerFault):
    """An execution provider that cannot be used."""
