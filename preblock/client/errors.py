"""Every error that the client raises on purpose. The kinds that a service answers with have its own names.

    PreblockError
    ├── ServiceError                the service answered with a problem document
    │   ├── ClientFault             the request is at fault; the same request fails again
    │   │   ├── Malformed           bytes that cannot be read as what they claim to be
    │   │   ├── Invalid             readable, but a value is not allowed
    │   │   ├── Unauthenticated     no key that is known, where one is needed
    │   │   ├── NotFound            no such model or version
    │   │   ├── Forbidden           what the settings, or the key, do not allow
    │   │   ├── Conflict            the client's idea of a stream is not its state
    │   │   ├── TooLarge            over a limit of size
    │   │   ├── RateLimited             over a limit of how often a caller may ask
    │   │   ├── UnsupportedFormat   a request format that is not read
    │   │   └── NotAcceptable       an answer format that is not written
    │   └── ServerFault             the request may be fine
    │       ├── Unavailable         not ready, shutting down, or too busy
    │       ├── ArtifactError       an artifact that is broken or not understood
    │       └── ProviderError       an execution provider that cannot be used
    └── NoAnswer                    no answer came
        ├── ConnectionFailed        no connection, or it broke
        ├── TimedOut                not in time
        └── StreamClosed            a decode stream that is over; it says where to resume

A `ServiceError` names the field, the value got and the value allowed, where the service does.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

KIND = "urn:preblock:error:"


class PreblockError(Exception):
    """Whatever the client raises on purpose."""


class ServiceError(PreblockError):
    """The service answered with a problem document.

    Args:
        problem: the document (RFC 9457), with `type`, `title`, `status`, `detail`, `field`, `got`, `allowed`, as far as
            the service states them.

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
    """Over a limit of how often a caller may ask; the same request may succeed later."""


class UnsupportedFormat(ClientFault):
    """A request format that is not read."""


class NotAcceptable(ClientFault):
    """An answer format that is not written."""


class ServerFault(ServiceError):
    """The request may be fine; the service cannot answer it."""


class Unavailable(ServerFault):
    """Not ready, shutting down, or too busy; the same request may succeed later."""


class ArtifactError(ServerFault):
    """An artifact that is broken or not understood."""


class ProviderError(ServerFault):
    """An execution provider that cannot be used."""


class NoAnswer(PreblockError):
    """No answer came."""


class ConnectionFailed(NoAnswer):
    """No connection could be made, or it broke."""


class TimedOut(NoAnswer):
    """Nothing happened for as long as the client waits."""


class StreamClosed(NoAnswer):
    """A decode stream that is over. A new one with `offset`, of each row, goes on where the last answer ended."""

    def __init__(self, reason: str, offset: list[int]) -> None:
        super().__init__(reason, offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"{self.args[0]}; a new stream resumes at offset {self.offset}"


KINDS = {kind.__name__: kind for parent in (ClientFault, ServerFault) for kind in parent.__subclasses__()}


def of_problem(status: int, body: bytes | bytearray) -> ServiceError:
    """Return the error that an answer states; one that states no known kind is a fault by its status."""
    try:
        problem = json.loads(body)
    except ValueError:  # no answer of the service itself, but of something before it
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
    """Return the error for a value that cannot even be sent."""
    detail = f"{field}: got {got}, allowed {allowed}"
    stated = {"detail": detail, "field": field, "got": str(got), "allowed": allowed}
    return Invalid({"type": f"{KIND}Invalid", "title": "Invalid", **stated})


@contextmanager
def needed(what: str, package: str) -> Iterator[None]:
    """Say which package is missing where the import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{what} needs {package}: pip install 'preblock[client]'"
        raise ModuleNotFoundError(text, name=error.name) from error
