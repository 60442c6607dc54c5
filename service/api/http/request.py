"""Requests as they arrive: what their headers say, and their bodies."""

from fastapi import Request
from starlette.types import Receive, Scope


class RawRequest:
    """A request, whose headers are looked up faster than those of a framework.

    Args:
        scope: as ASGI has it; only the path, the query and the headers are looked at.
        receive: of ASGI, for a body that comes by and by.
        body: the whole body, where it is there; default None.

    """

    __slots__ = ("_fields", "body", "receive", "scope")

    def __init__(self, scope: Scope, receive: Receive, body: bytes | None = None) -> None:
        self.scope = scope
        self.receive = receive
        self.body = body
        # Of a header that stands twice, the first.
        self._fields: dict[bytes, bytes] = dict(reversed(scope["headers"]))

    @classmethod
    def of(cls, request: Request) -> "RawRequest":
        """Return a request that FastAPI has routed."""
        return cls(request.scope, request.receive)

    @property
    def path(self) -> str:
        """Where it goes."""
        return str(self.scope["path"])

    @property
    def query(self) -> bytes:
        """What the query says."""
        return bytes(self.scope["query_string"])

    @property
    def accept(self) -> str:
        """What every `Accept` says."""
        if b"accept" not in self._fields:
            return ""
        return ", ".join(value.decode("latin-1") for name, value in self.scope["headers"] if name == b"accept")

    def header(self, name: bytes) -> str | None:
        """Return what the first header of a name, in lower case, says."""
        value = self._fields.get(name)
        return None if value is None else value.decode("latin-1")
