"""Errors of the client. Subclasses of ServiceError have the names used by the service.

    PreblockError
    ├── ServiceError                the service answered with a problem document
    │   ├── ClientFault             the request is at fault; the same request fails again
    │   │   ├── Malformed           the body cannot be parsed as its content type
    │   │   ├── Invalid             a value is not allowed
    │   │   ├── Unauthenticated     the key is missing or unknown
    │   │   ├── NotFound            no such model or version
    │   │   ├── Forbidden           the settings or the key do not allow the request
    │   │   ├── Conflict            the client's idea of a stream is not its state
    │   │   ├── TooLarge            over a size limit
    │   │   ├── RateLimited             over a rate limit
    │   │   ├── UnsupportedFormat   the request format is not supported
    │   │   └── NotAcceptable       the response format is not supported
    │   └── ServerFault             the request may be fine
    │       ├── Unavailable         not ready, shutting down, or too busy
    │       ├── ArtifactError       the artifact is damaged or of an unknown version
    │       └── ProviderError       the execution provider cannot be used
    └── NoAnswer                    no answer came
        ├── ConnectionFailed        no connection, or it broke
        ├── TimedOut                not in time
        └── StreamClosed            the decode stream ended; `offset` says where to resume

A `ServiceError` holds the field, the value got and the values allowed, if the service states them.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

KIND = "urn:preblock:error:"


class PreblockError(Exception):
    """Base class of the client's errors."""


class ServiceError(PreblockError):
    """The service answered with a problem document.

    Args:
        problem: the document (RFC 9457). The service states some of `type`, `title`, `status`, `detail`, `field`,
            `got` and `allowed`.

    """

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.problem = problem
        self.status: int | None = problem.get("status")
        self.field: str | None = problem.get("field")
        self.got: str | None = problem.get("got")
        self.allowed: str | None = problem.get("allowed")

    def __str__(self) -> str:
        return str(self.problem.get("detail"))


class ClientFault(ServiceError):
    """The request is at fault; the same request fails again."""


class Malformed(ClientFault):
    """The body cannot be parsed as its content type."""


class Invalid(ClientFault):
    """A value is not allowed."""


class Unauthenticated(ClientFault):
    """The key is missing or unknown."""


class NotFound(ClientFault):
    """No such model or version."""


class Forbidden(ClientFault):
    """The settings or the key do not allow the request."""


class Conflict(ClientFault):
    """The client's idea of a stream is not its state."""


class TooLarge(ClientFault):
    """Over a size limit."""


class RateLimited(ClientFault):
    """Over a rate limit; the same request may succeed later."""


class UnsupportedFormat(ClientFault):
    """The request format is not supported."""


class NotAcceptable(ClientFault):
    """The response format is not supported."""


class ServerFault(ServiceError):
    """The request may be fine; the service cannot answer it."""


class Unavailable(ServerFault):
    """Not ready, shutting down, or too busy; the same request may succeed later."""


class ArtifactError(ServerFault):
    """The artifact is damaged or of an unknown version."""


class ProviderError(ServerFault):
    """The execution provider cannot be used."""


class NoAnswer(PreblockError):
    """No answer came."""


class ConnectionFailed(NoAnswer):
    """No connection could be made, or it broke."""


class TimedOut(NoAnswer):
    """Nothing arrived within the timeout."""


class StreamClosed(NoAnswer):
    """The decode stream ended. A new stream with `offset`, one for each row, resumes after the last answer."""

    def __init__(self, reason: str, offset: list[int]) -> None:
        super().__init__(reason, offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"{self.args[0]}; a new stream resumes at offset {self.offset}"


KINDS = {kind.__name__: kind for parent in (ClientFault, ServerFault) for kind in parent.__subclasses__()}


def of_problem(status: int, body: bytes | bytearray) -> ServiceError:
    """Return the error of a problem document; without a known kind, the status decides."""
    try:
        problem = json.loads(body)
    except ValueError:  # the answer of a proxy, not of the service
        problem = None
    if not isinstance(problem, dict):
        problem = {"status": status, "detail": f"status {status}: {body[:200].decode(errors='replace')}"}
    if status == 503:
        return Unavailable(problem)
    if status == 429:
        return RateLimited(problem)
    fault = ClientFault if 400 <= status < 500 else ServerFault
    return KINDS.get(str(problem.get("type")).removeprefix(KIND), fault)(problem)


def invalid(field: str, got: object, allowed: str) -> Invalid:
    """Return the error for a value rejected before sending."""
    detail = f"{field}: got {got}, allowed {allowed}"
    stated = {"detail": detail, "field": field, "got": str(got), "allowed": allowed}
    return Invalid({"type": f"{KIND}Invalid", "title": "Invalid", **stated})


@contextmanager
def needed(what: str, package: str) -> Iterator[None]:
    """Name the package to install if the import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{what} needs {package}: pip install 'preblock[client]'"
        raise ModuleNotFoundError(text, name=error.name) from error
