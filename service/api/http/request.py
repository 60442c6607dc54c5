"""Parsed requests: path, query, headers, body and route."""

from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope

from preblock.service.core.errors import Invalid


class RawRequest:
    """A request with a faster header lookup than Starlette's.

    Args:
        scope: ASGI scope with path, query and headers.
        receive: ASGI channel of the body.
        body: complete body, if it has already arrived; default None.

    """

    __slots__ = ("_fields", "body", "receive", "scope")

    def __init__(self, scope: Scope, receive: Receive, body: bytes | None = None) -> None:
        self.scope = scope
        self.receive = receive
        self.body = body
        self._fields: dict[bytes, bytes] = dict(reversed(scope["headers"]))

    @classmethod
    def of(cls, request: Request) -> "RawRequest":
        """Convert a request of FastAPI."""
        return cls(request.scope, request.receive)

    @property
    def query(self) -> bytes:
        """The query string."""
        return bytes(self.scope["query_string"])

    def list_header(self, name: bytes) -> str:
        """Return all headers with a lower-case name, joined by commas (RFC 9110, section 5.3); "" without one."""
        if name not in self._fields:
            return ""
        return ", ".join(value.decode("latin-1") for other, value in self.scope["headers"] if other == name)

    def header(self, name: bytes) -> str | None:
        """Return the first header with a lower-case name; None without one."""
        value = self._fields.get(name)
        return None if value is None else value.decode("latin-1")


Handler = Callable[[RawRequest, str, str | None], Awaitable[Response]]
"""Answers a request for a model by its name and its version; None stands for the highest version."""


class Route(NamedTuple):
    """The route of a tensor request.

    Args:
        handler: answers the request.
        name: model name in the path.
        version: model version in the path; None for the highest version.
        pattern: path pattern, such as `/models/{name}/embed`.
        path: path of the request.
        query: query of the request; empty if the route was found by its path.

    """

    handler: Handler
    name: str
    version: str | None
    pattern: str
    path: str
    query: bytes


@lru_cache  # clients repeat their URLs
def single_values(query: bytes) -> Mapping[str, str]:
    """Return the parameters of a query string by name.

    Raises:
        Invalid: a parameter occurs more than once.

    """
    parameters = QueryParams(query)
    for name in parameters:
        count = len(parameters.getlist(name))
        if count > 1:
            message = f"the query has {count} values of {name}; send one, and write a list as [1,2]"
            raise Invalid(name, f"{count} values", "one value", message=message)
    return MappingProxyType(dict(parameters))


def merge_fields(query: Mapping[str, Any], body: Mapping[str, Any], place: str = "body") -> dict[str, Any]:
    """Return the fields of the query and of the body together; errors name the body as `place`.

    Raises:
        Invalid: a field is in both.

    """
    for name in query:
        if name in body:
            message = f"{name} is both in the query and in the {place}; send it in one of them"
            raise Invalid(name, "two values", "one value", message=message)
    return {**query, **body}
