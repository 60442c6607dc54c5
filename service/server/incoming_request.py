"""A request as it is read, and how far its answer is."""

from contextvars import Context

from preblock.service.api.http.request import Route
from preblock.service.api.request_cache import RequestTemplate

Header = tuple[bytes, bytes]


class IncomingRequest:
    """One request of a connection.

    `headers` are in their order; `passing` holds the headers that only identify the request, with lower-case names. The
    body is in `parts` until it is handed on. `target`, and the fields after it, are set for a request for tensors.

    Args:
        began: when its head came, of `perf_counter`.

    """

    __slots__ = (
        *("answer_begun", "answered", "began", "changes", "chunked", "client", "complete", "context", "template"),
        *("headers", "keep_alive", "key", "method", "parts", "passing", "scheme", "target", "upgrades", "url"),
        "version",
    )

    def __init__(self, began: float) -> None:
        self.began = began
        self.url = b""
        self.method = b""
        self.version = "1.1"
        self.headers: list[Header] = []
        self.passing: list[Header] = []
        self.parts: list[bytes] = []
        self.keep_alive = True
        self.upgrades = False
        self.chunked = False
        self.complete = False
        self.answer_begun = False
        self.answered = False
        self.target: Route | None = None
        self.template: RequestTemplate | None = None
        self.context: Context | None = None
        self.key: tuple[object, ...] = ()
        self.changes = 0
        self.client: tuple[str, int] | None = None
        self.scheme: str | None = None

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
