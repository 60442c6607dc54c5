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
from preblock.service.observability.context import RequestContext, wanted
from preblock.service.server.incoming_request import Header, IncomingRequest
from preblock.service.server.tensor_responder import TensorResponder, refuse_receive
from preblock.service.server.uvicorn_adapter import ProxyHeadersMiddleware

if TYPE_CHECKING:
    from preblock.service.server.front import Front

MAX_BODY_BYTES = 2**18
"""A longer body is read by the application, because its answer takes long anyway."""
APPLICATION_HEADERS = {b"expect", b"transfer-encoding", b"content-encoding", b"upgrade", b"origin"}
"""The application answers requests with these headers."""
CREDENTIAL = b"authorization"
"""The cache of templates outlives the connection, so its keys leave out this header."""
BEGIN = b"POST "
HEAD_END = b"\r\n\r\n"


class KnownHead(NamedTuple):
    """The head of the last request with a template; the next may begin with the same bytes.

    Args:
        data: its bytes.
        request_size: bytes of the request, with its body.
        route: of the request.
        key: of its template.
        identifying: the identifying headers of the request.
        request_id: the request id in them.
        scheme: of the URL.
        caller: names its caller.
        key_changes: of the keys, as `Dispatcher.changes` counts them.

    """

    data: bytes
    request_size: int
    route: Route
    key: Hashable
    identifying: list[Header]
    request_id: bytes | None
    scheme: str | None
    caller: Context
    key_changes: int


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
            self._proxies.app = _null_app
        self._dispatcher = app if isinstance(app, Dispatcher) else None
        self._responder = None if self._dispatcher is None else TensorResponder(connection, self._dispatcher)
        self._known: KnownHead | None = None
        self._held_since = 0.0  # when the known head came without its body; 0: it did not

    def answer_repeated(self, data: bytes) -> bytes:
        """Answer a request with a known head, or hold the head; return the rest of the input."""
        known = self._known
        if known is None:
            return data
        if self._held_since:
            data = known.data + data
        if data.startswith(known.data) and self._answer_known(known, data):
            return b""
        return data

    def pop_start_time(self) -> float:
        """Return the arrival time of the next request."""
        began, self._held_since = self._held_since or perf_counter(), 0.0
        return began

    def held_head(self) -> bytes:
        """Return the held head."""
        return self._known.data if self._held_since and self._known is not None else b""

    def _answer_known(self, known: KnownHead, data: bytes) -> bool:
        connection, size = self._connection, len(data)
        began = self._held_since or perf_counter()
        if not connection.between_requests or connection.incomplete_bytes or connection.active is not None:
            return False
        if connection.scheduler.rest or (size != known.request_size and size != len(known.data)):
            return False
        connection.clear_deadline()
        if size != known.request_size:
            self._held_since = began
            return True
        assert self._dispatcher is not None
        assert self._dispatcher.templates is not None
        assert self._responder is not None
        if self._dispatcher.changes() != known.key_changes:
            return False
        template = known.caller.run(self._dispatcher.templates.find, known.key)
        if template is None:
            return False
        body = data[len(known.data) :]
        context = RequestContext(known.request_id, began)
        context.received, context.read = len(body), perf_counter() - began
        connection.active = REPEATED_REQUEST
        answer = self._responder.answer_by_template
        if known.caller.run(answer, template, known.route, body, context, known.scheme, known.identifying):
            self._held_since = 0.0
            return True
        connection.active = None
        return False

    def accepts(self, incoming: IncomingRequest) -> bool:
        """Return whether the connection answers a request itself, and set its fields for that."""
        dispatcher = self._dispatcher
        if dispatcher is None or incoming.method != b"POST" or incoming.version != "1.1":
            return False
        route = dispatcher.target(incoming.url)
        if route is None:
            return False
        connection = self._connection
        incoming.client, incoming.scheme = connection.client, connection.scheme
        if self._proxies is not None:
            self._forward(incoming, self._proxies)
        if dispatcher.templates is not None:
            incoming.key = (incoming.url, *(header for header in incoming.headers if header[0].lower() != CREDENTIAL))
            incoming.key_changes = dispatcher.changes()
            caller = dispatcher.admitted(incoming.headers, incoming.client)
            if caller is not None and (template := caller.run(dispatcher.templates.find, incoming.key)) is not None:
                incoming.route, incoming.template, incoming.caller = route, template, caller
                return True
        length = None
        for name, value in incoming.headers:
            lower = name.lower()
            if lower == b"content-length":
                length = value
            elif lower in APPLICATION_HEADERS:
                return False
        if length is None or len(length) > 6 or int(length) > MAX_BODY_BYTES:
            return False
        incoming.route = route
        return True

    @staticmethod
    def _forward(incoming: IncomingRequest, proxies: ProxyHeadersMiddleware) -> None:
        """Take the client and the scheme from the headers of a trusted proxy."""
        scope: dict[str, Any] = {"type": "http", "client": incoming.client, "scheme": incoming.scheme}
        scope["headers"] = incoming.identifying
        with suppress(StopIteration):  # the middleware waits for nothing
            proxies(scope, refuse_receive, _discard).send(None)  # type: ignore[arg-type]
        incoming.client, incoming.scheme = scope["client"], scope["scheme"]

    def answer(self, incoming: IncomingRequest, first_input: bytes) -> None:
        """Answer an accepted request: its body is complete. `first_input` is its first input."""
        route, responder = incoming.route, self._responder
        assert route is not None
        assert responder is not None
        body = incoming.chunks[0] if len(incoming.chunks) == 1 else b"".join(incoming.chunks)
        context = RequestContext(wanted(incoming.identifying), incoming.began)
        context.received, context.read = len(body), perf_counter() - incoming.began
        scheme, identifying = incoming.scheme, incoming.identifying
        if incoming.template is not None and incoming.caller is not None:
            answer = responder.answer_by_template
            if incoming.caller.run(answer, incoming.template, route, body, context, scheme, identifying):
                self._remember(incoming, route, incoming.caller, first_input, len(body))
                return
        headers = [(name.lower(), value) for name, value in incoming.headers]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": route.path,
            "query_string": route.query,
            "headers": [*headers, *identifying],
            "client": incoming.client,
            "scheme": scheme,
        }
        responder.answer(RawRequest(scope, refuse_receive, body), route, context, incoming.key, scheme, identifying)

    def _remember(
        self, incoming: IncomingRequest, route: Route, caller: Context, first_input: bytes, length: int
    ) -> None:
        """Remember the head of a request with such a body, if it came alone, and the head or all of it at once."""
        head, end, rest = first_input.partition(HEAD_END)
        # An empty line may stand before a request; it ends no head.
        if end and head.startswith(BEGIN) and len(rest) in (0, length) and incoming.keep_alive:
            head += end
            identifying = incoming.identifying, wanted(incoming.identifying), incoming.scheme
            self._known = KnownHead(
                head, len(head) + length, route, incoming.key, *identifying, caller, incoming.key_changes
            )


REPEATED_REQUEST = IncomingRequest(0.0, complete=True)
"""Stands for each request with a known head."""


async def _discard(_: object) -> None:
    """Send nothing."""


async def _null_app(*_: object) -> None:
    """Answer nothing: the middleware is asked for the client only."""
