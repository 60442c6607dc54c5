"""A request as it is read, and how far its answer is."""

from contextvars import Context
from dataclasses import dataclass, field

from preblock.service.api.http.request import Route
from preblock.service.api.request_cache import RequestTemplate

Header = tuple[bytes, bytes]


@dataclass(eq=False, slots=True)
class IncomingRequest:
    """One request of a connection.

    Args:
        began: arrival of its head, a timestamp of `perf_counter`.
        headers: in their order, without those of `passing`.
        passing: the headers that only identify the request, with lower-case names.
        parts: the body, until it is handed on.
        chunked: whether the contained protocol reads the body in chunks.
        complete: whether the body is complete.
        answer_begun: whether the contained protocol has begun the answer.
        answered: whether the answer is written, although the body is not complete.
        target: route of a request for tensors. The fields after it are set for such a request.
        key: of its template in the cache.
        changes: of the keys, as `Dispatcher.changes` counts them.

    """

    began: float
    url: bytes = b""
    method: bytes = b""
    version: str = "1.1"
    headers: list[Header] = field(default_factory=list)
    passing: list[Header] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    keep_alive: bool = True
    upgrades: bool = False
    chunked: bool = False
    complete: bool = False
    answer_begun: bool = False
    answered: bool = False
    target: Route | None = None
    template: RequestTemplate | None = None
    context: Context | None = None
    key: tuple[object, ...] = ()
    changes: int = 0
    client: tuple[str, int] | None = None
    scheme: str | None = None

    @property
    def head_size(self) -> int:
        """Bytes of the address and the headers."""
        return len(self.url) + sum(len(name) + len(value) for name, value in (*self.headers, *self.passing))

    @property
    def is_websocket(self) -> bool:
        """Whether the client asks for a WebSocket."""
        return self.upgrades and any(
            name.lower() == b"upgrade" and value.lower() == b"websocket" for name, value in self.headers
        )

    def head(self) -> bytes:
        """Return the head, written anew from the parsed parts."""
        lines = [b"%b %b HTTP/%b\r\n" % (self.method, self.url, self.version.encode())]
        lines += [b"%b: %b\r\n" % header for header in (*self.headers, *self.passing)]
        return b"".join((*lines, b"\r\n"))
