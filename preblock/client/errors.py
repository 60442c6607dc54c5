"""Errors of the client.

The classes form a tree::

    ClientError                 base class
    ├── ServiceError            the service answered with a problem document; `kind` names the error
    │   ├── RequestError        the request is at fault; the same request fails again, unless it is RateLimited
    │   └── ServerError         the service cannot answer; the request may be fine
    └── NoAnswer                no answer came
        ├── ConnectionFailed    no connection, or it broke
        ├── TimedOut            nothing arrived within the timeout
        └── StreamClosed        the decode stream ended; `offset` says where to resume
"""

import json
from collections.abc import Mapping
from typing import Any

MAX_BAD_INDICES = 100
"""Most items of a list that an error names."""
KIND_PREFIX = "urn:preblock:error:"
KIND_OF_STATUS = {429: "RateLimited", 503: "Unavailable"}
KIND_OF_OPEN_INFERENCE_STATUS = KIND_OF_STATUS | {401: "Unauthenticated", 403: "Forbidden", 404: "NotFound"}
"""Kinds of errors of the Open Inference Protocol, whose bodies name none."""


class ClientError(Exception):
    """Base class of the client's errors.

    `retry_after` is the least pause in seconds before a retry; None if a retry is useless.
    """

    retry_after: float | None = None


class ServiceError(ClientError):
    """The service answered with a problem document.

    `kind` is the kind of error, such as "NotFound" (listed in docs/http.md), or "status 502" if the answer names none.
    `status`, `field`, `got` and `expected` come from the document; each is None if the document lacks it.
    `bad_indices` are the indices of the first 100 bad items of a list, and `bad_count` is the number of all.

    Args:
        problem: the document (RFC 9457). The service states some of `type`, `title`, `status`, `detail`, `field`,
            `got`, `expected`, `bad_indices` and `bad_count`.

    """

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(problem)
        self.problem = problem
        self.status: int | None = problem.get("status")
        self.field: str | None = problem.get("field")
        self.got: str | None = problem.get("got")
        self.expected: str | None = problem.get("expected")
        self.bad_indices: list[int] = problem.get("bad_indices") or []
        self.bad_count: int = problem.get("bad_count") or 0
        prefix, _, kind = str(problem.get("type")).partition(KIND_PREFIX)
        kinds = KIND_OF_OPEN_INFERENCE_STATUS if "error" in problem else KIND_OF_STATUS
        self.kind: str = kind if not prefix else kinds.get(self.status or 0, f"status {self.status}")

    def __str__(self) -> str:
        return str(self.problem.get("detail") or self.problem.get("error"))


class RequestError(ServiceError):
    """The request is at fault; the same request fails again, unless its kind is "RateLimited"."""


class ServerError(ServiceError):
    """The service cannot answer; the request may be fine."""


class NoAnswer(ClientError):
    """No answer came."""


class ConnectionFailed(NoAnswer):
    """No connection could be made, or it broke."""

    retry_after = 0.0


class TimedOut(NoAnswer):
    """Nothing arrived within the timeout."""


class StreamClosed(NoAnswer):
    """The decode stream ended. A new stream with `offset`, one for each row, resumes after the last answer."""

    def __init__(self, reason: str, offset: list[int]) -> None:
        super().__init__(reason, offset)
        self.offset = offset

    def __str__(self) -> str:
        return f"{self.args[0]}; a new stream resumes at offset {self.offset}"


def of_problem(status: int, body: bytes | bytearray) -> ServiceError:
    """Return the error of a response, or with `status` 0 of a message that states its status."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        read = None
    problem = dict(read) if isinstance(read, dict) else {}
    if not status and isinstance(problem.get("status"), int):
        status = problem["status"]
    problem["status"] = status  # in the JSON of a gateway it may be a text
    if not isinstance(problem.get("detail") or problem.get("error"), str):  # the answer of a proxy, not of the service
        problem["detail"] = f"status {status}: {body[:200].decode(errors='replace')}"
    return RequestError(problem) if 400 <= status < 500 else ServerError(problem)


def bad_items(indices: list[int]) -> dict[str, Any]:
    """Return the fields of a problem document about bad items of a list."""
    return {"bad_indices": indices[:MAX_BAD_INDICES], "bad_count": len(indices)}


def invalid(field: str, got: object, allowed: str, message: str | None = None) -> RequestError:
    """Return the error for a value rejected before sending; `message` replaces "FIELD: got …, expected …"."""
    detail = message or f"{field}: got {got}, expected {allowed}"
    stated = {"detail": detail, "field": field, "got": str(got), "expected": allowed}
    return RequestError({"type": f"{KIND_PREFIX}Invalid", "title": "Invalid", **stated})
