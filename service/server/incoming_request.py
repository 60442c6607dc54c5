"""One HTTP request on a connection, and the progress of its response."""

import re
from collections.abc import Hashable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from preblock.service.api.http.request import Route
from preblock.service.api.http.response import lines_of
from preblock.service.observability.context import PER_REQUEST_HEADERS, Headers, Target

MAX_VALUE_CHARS = 80
MAX_HEAD_BYTES = 2**16  # of URL and headers, and of the trailers of a chunked body
MAX_IDLE_HEAD_BYTES = 2**12
"""Longest head that an idle connection keeps, to answer the next request faster."""
LINE_BYTES = 4  # of a header: a colon, a space and the end of the line
HEAD_TOO_LONG = f"the headers have more than {MAX_HEAD_BYTES} bytes, the limit"
ABSOLUTE_FORM = re.compile(rb"https?://(?:[^/?#]*@)?([^/?#@]+)((?:[/?#].*)?)", re.IGNORECASE)
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
FRAMING_HEADERS = frozenset((b"host", b"transfer-encoding", b"expect"))
WEBSOCKET, WEBSOCKET_VERSION = b"websocket", b"13"


class Refusal(NamedTuple):
    """The response to malformed input, after which the connection closes.

    Args:
        status: HTTP status.
        text: a sentence for the client.
        headers: further headers.

    """

    status: int
    text: str
    headers: Headers = ()

    def response(self, headers: Headers) -> bytes:
        """Return the response, with these headers besides its own."""
        content = self.text.encode()
        fields: list[tuple[bytes, bytes]] = [
            *headers,
            *self.headers,
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(content)),
            (b"connection", b"close"),
        ]
        return b"".join((STATUS_LINES[self.status], lines_of(fields), b"\r\n", content))


@dataclass(eq=False, slots=True)
class TensorCall:
    """What the head of a tensor request says, for each body after it.

    Args:
        route: of the request.
        target: for the context of the request.
        caller: context variables with the authenticated caller; None if its check failed.
        key: of its prepared request in the cache.
        key_changes: number of changes of the API keys so far; after another one, callers need a new check.
        request_id: from the headers, if the client sent one.
        client: address and port of the client, as reported by a trusted proxy.
        scheme: of the URL, as reported by a trusted proxy.
        identifying: request id and trace headers.

    """

    route: Route
    target: Target
    caller: Context | None
    key: Hashable
    key_changes: int
    request_id: bytes | None
    client: tuple[str, int] | None
    scheme: str
    identifying: list[tuple[bytes, bytes]]


@dataclass(eq=False, slots=True)
class IncomingRequest:
    """One request of a connection.

    Args:
        began: arrival of its head, a timestamp of `perf_counter`.
        headers: in their order, with lower-case names, without the headers in `identifying`.
        identifying: request id and trace headers, with lower-case names.
        size: bytes of the URL and the headers; after the head, bytes of the trailers.
        hosts: number of `Host` headers.
        transfer_encodings: values of the `Transfer-Encoding` headers, in lower case.
        expects_continue: whether the client waits for an interim response before it sends the body.
        chunks: the body received so far, until the application or the response takes it.
        accepted: whether the head is complete, and the request has its place in the order of responses.
        complete: whether the body is complete.
        refusal: response to malformed input at the place of this request, or in its body; None without an error.
        rest: of a WebSocket, the first input after its head.
        answer_begun: whether the response was begun.
        answered: whether the response was written before the body was complete.
        call: of a tensor request; None if the application answers.

    """

    began: float
    url: bytes = b""
    method: bytes = b""
    version: str = "1.1"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    identifying: list[tuple[bytes, bytes]] = field(default_factory=list)
    size: int = 0
    hosts: int = 0
    transfer_encodings: tuple[bytes, ...] = ()
    expects_continue: bool = False
    chunks: list[bytes] = field(default_factory=list)
    keep_alive: bool = True
    upgrades: bool = False
    accepted: bool = False
    complete: bool = False
    refusal: Refusal | None = None
    rest: bytes = b""
    answer_begun: bool = False
    answered: bool = False
    call: TensorCall | None = None

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header of the head. Headers for the request's identity are kept apart.

        The parser leaves whitespace after a value; it is not part of the value (RFC 9110, section 5.5).
        """
        lower, value = name.lower(), value.rstrip(b" \t")
        if lower in PER_REQUEST_HEADERS:
            self.identifying.append((lower, value))
            return
        self.headers.append((lower, value))
        if lower not in FRAMING_HEADERS:
            return
        if lower == b"host":
            self.hosts += 1
        elif lower == b"transfer-encoding":
            self.transfer_encodings = *self.transfer_encodings, value.lower()
        else:
            self.expects_continue = self.expects_continue or value.lower() == b"100-continue"

    def use_origin_form(self) -> None:
        """Replace an absolute target by its path and query, and the host by the one of the target.

        Source: RFC 9112, section 3.2.2.
        """
        if not self.url.startswith(b"/") and (absolute := ABSOLUTE_FORM.fullmatch(self.url)) is not None:
            host, target = absolute.groups()
            self.url = target if target.startswith(b"/") else b"/" + target
            self.headers = [(name, host if name == b"host" else value) for name, value in self.headers]

    def check_head(self) -> Refusal | None:
        """Return the refusal of a complete head with invalid or unsupported headers; None for any other."""
        if self.size > MAX_HEAD_BYTES:
            return Refusal(431, HEAD_TOO_LONG)
        if self.hosts > 1:
            return Refusal(400, f"the request has {self.hosts} Host headers; send one")
        if not self.hosts and self.version == "1.1":
            return Refusal(400, "the request has no Host header; HTTP/1.1 requires one")
        if self.transfer_encodings and any(name == b"content-length" for name, _ in self.headers):
            return Refusal(400, "the request has the headers Content-Length and Transfer-Encoding; send one of them")
        if self.transfer_encodings not in ((), (b"chunked",)):
            return Refusal(501, f"Transfer-Encoding: got {_quote(self.transfer_encodings)}, expected chunked")
        if not self.upgrades or not self.is_websocket:
            return None
        if not self.url.isascii():
            return Refusal(400, "the URL of the WebSocket has characters outside ASCII; percent-encode them")
        versions = [value for name, value in self.headers if name == b"sec-websocket-version"]
        if versions and versions != [WEBSOCKET_VERSION]:
            headers = (b"sec-websocket-version", WEBSOCKET_VERSION), (b"upgrade", WEBSOCKET)
            return Refusal(426, f"Sec-WebSocket-Version: got {_quote(versions)}, expected 13", headers)
        return None

    @property
    def is_websocket(self) -> bool:
        """Whether the client requests a WebSocket, alone or among other protocols (RFC 9110, section 7.8)."""
        if not self.upgrades or not self.knows_chunks:
            return False
        offers = b",".join(value for name, value in self.headers if name == b"upgrade")
        return any(protocol.strip().lower() == WEBSOCKET for protocol in offers.split(b","))

    @property
    def knows_chunks(self) -> bool:
        """Whether the client's version has chunks, interim responses and upgrades: HTTP/1.1 does (RFC 9110, 10.1.1)."""
        return self.version >= "1.1"

    @property
    def has_sure_end(self) -> bool:
        """Whether a later request may follow: chunks before HTTP/1.1 count as faulty (RFC 9112, section 6.1)."""
        return self.knows_chunks or not self.transfer_encodings

    @property
    def offers_other_protocol(self) -> bool:
        """Whether the client offers a protocol that the server ignores. Java's HTTP client offers HTTP/2."""
        return self.upgrades and self.method != b"CONNECT" and not self.is_websocket

    def head_without_upgrade(self) -> bytes:
        """Return the head without the offer of another protocol."""
        self.headers = [header for header in self.headers if header[0] != b"upgrade"]
        return self.head()

    def head_of_websocket(self) -> bytes:
        """Return the head with the offer of a WebSocket alone: `websockets` refuses a list of protocols."""
        others = [header for header in self.headers if header[0] != b"upgrade"]
        self.headers = [*others, (b"upgrade", WEBSOCKET)]
        return self.head()

    def head(self) -> bytes:
        """Return the head, serialized from the parsed fields."""
        lines = [b"%b %b HTTP/%b\r\n" % (self.method, self.url, self.version.encode())]
        lines += [b"%b: %b\r\n" % header for header in (*self.headers, *self.identifying)]
        return b"".join((*lines, b"\r\n"))


def _quote(values: Sequence[bytes]) -> str:
    """Return the first characters of the values of a header, for a message."""
    return b", ".join(values)[:MAX_VALUE_CHARS].decode("latin-1")
