"""The connection's own answers to requests for tensors, and the memory of the last head.

Many clients send the same head again and again. Reading it takes a third of the time of a small answer.
"""

from collections.abc import Hashable
from contextlib import suppress
from contextvars import Context
from copy import copy
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.request import RawRequest, Route
from preblock.service.observability.context import RequestContext, find_request_id
from preblock.service.server.incoming_request import Header, IncomingRequest
from preblock.service.server.tensor_responder import TensorResponder, receive_nothing
from preblock.service.server.uvicorn_adapter import ProxyHeadersMiddleware

if TYPE_CHECKING:
    from preblock.service.server.front import Front

MAX_BODY_BYTES = 2**18
"""A longer body is read by the application, because its answer takes long anyway."""
ELSEWHERE = {b"expect", b"transfer-encoding", b"content-encoding", b"upgrade", b"origin"}
"""The application answers requests with these headers."""
CREDENTIAL = b"authorization"
"""The cache of templates outlives the connection, so its keys leave out this header."""
BEGIN = b"POST "
HEAD_END = b"\r\n\r\n"


class KnownHead(NamedTuple):
    """The head of the last request with a template; the next may begin with the same bytes.

    Args:
        head: its bytes.
        size: bytes of the request, with its body.
        target: of the request.
        key: of its template.
        passing: the identifying headers of the request.
        wanted: the request id in them.
        scheme: of the URL.
        context: names its caller.
        changes: of the keys, as `Dispatcher.changes` counts them.

    """

    head: bytes
    size: int
    target: Route
    key: Hashable
    passing: list[Header]
    wanted: bytes | None
    scheme: str | None
    context: Context
    changes: int


class TensorPath:
    """Chooses the requests that the connection answers itself, and has them answered.

    Args:
        connection: of the client.
        app: the application of the server; only ours has requests for tensors.

    """

    def __init__(self, connection: "Front", app: Any) -> None:
        self._connection = connection
        self._proxies: ProxyHeadersMiddleware | None = None
        if isinstance(app, ProxyHeadersMiddleware):
            self._proxies, app = copy(app), app.app
            self._proxies.app = _answer_nothing
        self._dispatcher = app if isinstance(app, Dispatcher) else None
        self._responder = None if self._dispatcher is None else TensorResponder(connection, self._dispatcher)
        self._known: KnownHead | None = None
        self._held = 0.0  # when the known head came without its body; 0: it did not

    def take(self, data: bytes) -> bytes:
        """Answer a request with a known head, or hold the head; return the rest of the input."""
        known = self._known
        if known is None:
            return data
        if self._held:
            data = known.head + data
        if data.startswith(known.head) and self._answer_known(known, data):
            return b""
        return data

    def take_time(self) -> float:
        """Return the arrival time of the next request."""
        began, self._held = self._held or perf_counter(), 0.0
        return began

    def take_held_head(self) -> bytes:
        """Return the held head."""
        return self._known.head if self._held and self._known is not None else b""

    def _answer_known(self, known: KnownHead, data: bytes) -> bool:
        connection, size = self._connection, len(data)
        began = self._held or perf_counter()
        if not connection.between or connection.unfinished or connection.active is not None:
            return False
        if connection.scheduler.rest or (size != known.size and size != len(known.head)):
            return False
        connection.has_come()
        if size != known.size:
            self._held = began
            return True
        assert self._dispatcher is not None
        assert self._dispatcher.templates is not None
        assert self._responder is not None
        if self._dispatcher.changes() != known.changes:
            return False
        template = known.context.run(self._dispatcher.templates.find, known.key)
        if template is None:
            return False
        body = data[len(known.head) :]
        visit = RequestContext(known.wanted, began)
        visit.received, visit.read = len(body), perf_counter() - began
        connection.active = ANSWERED_AT_ONCE
        answer = self._responder.answer_by_template
        if known.context.run(answer, template, known.target, body, visit, known.scheme, known.passing):
            self._held = 0.0
            return True
        connection.active = None
        return False

    def accepts(self, incoming: IncomingRequest) -> bool:
        """Return whether the connection answers a request itself, and set its fields for that."""
        dispatcher = self._dispatcher
        if dispatcher is None or incoming.method != b"POST" or incoming.version != "1.1":
            return False
        target = dispatcher.target(incoming.url)
        if target is None:
            return False
        connection = self._connection
        incoming.client, incoming.scheme = connection.client, connection.scheme
        if self._proxies is not None:
            self._forward(incoming, self._proxies)
        if dispatcher.templates is not None:
            incoming.key = (incoming.url, *(header for header in incoming.headers if header[0].lower() != CREDENTIAL))
            incoming.changes = dispatcher.changes()
            context = dispatcher.admitted(incoming.headers, incoming.client)
            if context is not None and (template := context.run(dispatcher.templates.find, incoming.key)) is not None:
                incoming.target, incoming.template, incoming.context = target, template, context
                return True
        length = None
        for name, value in incoming.headers:
            lower = name.lower()
            if lower == b"content-length":
                length = value
            elif lower in ELSEWHERE:
                return False
        if length is None or len(length) > 6 or int(length) > MAX_BODY_BYTES:
            return False
        incoming.target = target
        return True

    @staticmethod
    def _forward(incoming: IncomingRequest, proxies: ProxyHeadersMiddleware) -> None:
        """Take the client and the scheme from the headers of a trusted proxy."""
        scope: dict[str, Any] = {"type": "http", "client": incoming.client, "scheme": incoming.scheme}
        scope["headers"] = incoming.passing
        with suppress(StopIteration):  # the middleware waits for nothing
            proxies(scope, receive_nothing, _send_nothing).send(None)  # type: ignore[arg-type]
        incoming.client, incoming.scheme = scope["client"], scope["scheme"]

    def answer(self, incoming: IncomingRequest, came: bytes) -> None:
        """Answer an accepted request: its body is complete. `came` is its first input."""
        target, responder = incoming.target, self._responder
        assert target is not None
        assert responder is not None
        body = incoming.parts[0] if len(incoming.parts) == 1 else b"".join(incoming.parts)
        visit = RequestContext(find_request_id(incoming.passing), incoming.began)
        visit.received, visit.read = len(body), perf_counter() - incoming.began
        scheme, passing = incoming.scheme, incoming.passing
        if incoming.template is not None and incoming.context is not None:
            answer = responder.answer_by_template
            if incoming.context.run(answer, incoming.template, target, body, visit, scheme, passing):
                self._remember(incoming, target, incoming.context, came, len(body))
                return
        headers = [(name.lower(), value) for name, value in incoming.headers]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": target.path,
            "query_string": target.query,
            "headers": [*headers, *passing],
            "client": incoming.client,
            "scheme": scheme,
        }
        responder.answer(RawRequest(scope, receive_nothing, body), target, visit, incoming.key, scheme, passing)

    def _remember(self, incoming: IncomingRequest, target: Route, context: Context, came: bytes, length: int) -> None:
        """Remember the head of a request with such a body, if it came alone, and the head or all of it at once."""
        head, end, rest = came.partition(HEAD_END)
        # An empty line may stand before a request; it ends no head.
        if end and head.startswith(BEGIN) and len(rest) in (0, length) and incoming.keep_alive:
            head += end
            passing = incoming.passing, find_request_id(incoming.passing), incoming.scheme
            self._known = KnownHead(head, len(head) + length, target, incoming.key, *passing, context, incoming.changes)


ANSWERED_AT_ONCE = IncomingRequest(0.0, complete=True)
"""Stands for each request with a known head."""


async def _send_nothing(_: object) -> None:
    """Send nothing."""


async def _answer_nothing(*_: object) -> None:
    """Answer nothing: the middleware is asked for the client only."""
