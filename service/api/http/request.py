"""Requests as they arrive: path, query, headers, body, and the handler of their route."""

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
    """A request with a faster lookup of headers than a framework's.

    Args:
        scope: of ASGI; its path, query and headers are used.
        receive: of ASGI, for a body in parts.
        body: the whole body, where it is there; default None.

    """

    __slots__ = ("_fields", "body", "receive", "scope")

    def __init__(self, scope: Scope, receive: Receive, body: bytes | None = None) -> None:
        self.scope = scope
        self.receive = receive
        self.body = body
        # Of a repeated header, the first.
        self._fields: dict[bytes, bytes] = dict(reversed(scope["headers"]))

    @classmethod
    def of(cls, request: Request) -> "RawRequest":
        """Return the request of FastAPI's object."""
        return cls(request.scope, request.receive)

    @property
    def query(self) -> bytes:
        """The query."""
        return bytes(self.scope["query_string"])

    @property
    def accept(self) -> str:
        """The values of all `Accept` headers."""
        if b"accept" not in self._fields:
            return ""
        return ", ".join(value.decode("latin-1") for name, value in self.scope["headers"] if name == b"accept")

    def header(self, name: bytes) -> str | None:
        """Return the value of the first header of a lower-case name."""
        value = self._fields.get(name)
        return None if value is None else value.decode("latin-1")


Handler = Callable[[RawRequest, str, str | None], Awaitable[Response]]
"""Answers a request for a model, by its name and its version, if one is named."""


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


@lru_cache  # a client asks the same again and again
def single_values(query: bytes) -> Mapping[str, str]:
    """Return the parameters of a query string by name.

    Raises:
        Invalid: one is given more than once.

    """
    parameters = QueryParams(query)
    for name in parameters:
        if len(parameters.getlist(name)) > 1:
            raise Invalid(name, f"{len(parameters.getlist(name))} times in the query", "once; a list is written [1,2]")
    return MappingProxyType(dict(parameters))


def merge_fields(query: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the query and of the body together.

    Raises:
        Invalid: a field is in both.

    """
    for name in query:
        if name in body:
            raise Invalid(name, "one in the query and one in the body", "one of them")
    return {**query, **body}
