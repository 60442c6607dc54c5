"""One HTTP request on a connection, and the progress of its response."""

from collections.abc import Hashable
from contextvars import Context
from dataclasses import dataclass, field

from preblock.service.api.http.request import Route
from preblock.service.api.request_cache import RequestTemplate
from preblock.service.observability.context import Target


@dataclass(eq=False, slots=True)
class IncomingRequest:
    """One request of a connection.

    Args:
        began: arrival of its head, a timestamp of `perf_counter`.
        headers: in their order, without the headers in `identifying`.
        identifying: request id and trace headers, with lower-case names.
        chunks: the body received so far, until another protocol or the response takes it.
        chunked: whether the contained protocol reads the body in chunks.
        complete: whether the body is complete.
        answer_begun: whether the contained protocol has begun the response.
        answered: whether the response was written before the body was complete.
        target: of a tensor request, for its context.
        route: of a tensor request; None if the application answers. The fields below belong to it.
        template: of the request, if the cache has one.
        caller: context variables with the authenticated caller.
        key: of its template in the cache.
        key_changes: version of the API keys, from `Dispatcher.changes`.
        request_id: from the headers, if the client sent one.
        client: address and port of the client, as reported by a trusted proxy.
        scheme: of the URL, as reported by a trusted proxy.

    """

    began: float
    url: bytes = b""
    method: bytes = b""
    version: str = "1.1"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    identifying: list[tuple[bytes, bytes]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    keep_alive: bool = True
    upgrades: bool = False
    chunked: bool = False
    complete: bool = False
    answer_begun: bool = False
    answered: bool = False
    target: Target | None = None
    route: Route | None = None
    template: RequestTemplate | None = None
    caller: Context | None = None
    key: Hashable = ()
    key_changes: int = 0
    request_id: bytes | None = None
    client: tuple[str, int] | None = None
    scheme: str | None = None

    @property
    def head_size(self) -> int:
        """Bytes of the address and the headers."""
        return len(self.url) + sum(len(name) + len(value) for name, value in (*self.headers, *self.identifying))

    @property
    def is_websocket(self) -> bool:
        """Whether the client requests a WebSocket."""
        return self.upgrades and any(
            name.lower() == b"upgrade" and value.lower() == b"websocket" for name, value in self.headers
        )

    def head(self) -> bytes:
        """Return the head, serialized from the parsed fields."""
        lines = [b"%b %b HTTP/%b\r\n" % (self.method, self.url, self.version.encode())]
        lines += [b"%b: %b\r\n" % header for header in (*self.headers, *self.identifying)]
        return b"".join((*lines, b"\r\n"))
