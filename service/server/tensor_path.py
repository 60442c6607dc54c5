"""Code path for tensor requests: the connection answers them itself, and remembers the last request head.

Clients often repeat a head byte for byte. Parsing it takes a third of the time of a small response.
"""

from contextlib import suppress
from copy import copy
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.request import RawRequest
from preblock.service.api.request_cache import Template
from preblock.service.observability.context import RequestContext, find_request_id
from preblock.service.server.incoming_request import MAX_IDLE_HEAD_BYTES, IncomingRequest
from preblock.service.server.tensor_responder import TensorResponder
from preblock.service.server.uvicorn_bridge import ProxyHeadersMiddleware

if TYPE_CHECKING:
    from preblock.service.server.front import Front

MAX_BODY_BYTES = 2**18
"""The application reads longer bodies: their responses take long anyway."""
APPLICATION_HEADERS = {
    *(b"expect", b"transfer-encoding", b"content-encoding", b"upgrade"),
    *(b"origin", b"sec-fetch-site"),  # it checks them
}
"""The application answers requests with these headers."""
CREDENTIAL, LENGTH = b"authorization", b"content-length"
"""Template keys leave out the credential, because the cache outlives the connection."""
BEGIN = b"POST "
HEAD_END = b"\r\n\r\n"


class KnownHead(NamedTuple):
    """Head of the last request with a template; the next request may begin with the same bytes.

    Args:
        data: bytes of the head.
        request_size: bytes of the head and the body.
        request: the request, without its body.

    """

    data: bytes
    request_size: int
    request: IncomingRequest


class TensorPath:
    """Selects tensor requests, and passes them to the responder of the connection.

    Args:
        connection: of the client.
        app: the application of the server. Only a `Dispatcher` has routes for tensors.

    """

    def __init__(self, connection: "Front", app: Any) -> None:
        self._connection = connection
        self._proxies: ProxyHeadersMiddleware | None = None
        if isinstance(app, ProxyHeadersMiddleware):
            self._proxies, app = copy(app), app.app
            self._proxies.app = _null_app
        self._dispatcher = app if isinstance(app, Dispatcher) else Dispatcher(app, {})
        self._responder = TensorResponder(connection, self._dispatcher)
        self._known: KnownHead | None = None
        self._held_head = b""  # a known head without its body; empty if none is held
        self._held_since = 0.0  # arrival of that head, until it is answered or parsed; else 0

    @property
    def held(self) -> int:
        """Bytes of memory that the response to the last tensor request holds."""
        return self._responder.held

    def answer_repeated(self, data: bytes) -> bytes:
        """Answer a request with the known head, or hold the head until its body arrives; return the remaining input."""
        known = self._known
        if known is None:
            return data
        data = self.take_held_head() + data
        if data.startswith(known.data) and self._answer_known(known, data):
            return b""
        return data

    def pop_start_time(self) -> float:
        """Return the arrival time of the next request."""
        began, self._held_since = self._held_since or perf_counter(), 0.0
        return began

    def take_held_head(self) -> bytes:
        """Return the held head, and hold it no longer; empty if none is held."""
        head, self._held_head = self._held_head, b""
        return head

    def _refuse_held(self) -> None:
        """Refuse a held head, whose body is late."""
        self._connection.reader.read(self.take_held_head())
        self._connection.reader.refuse_late()

    def _answer_known(self, known: KnownHead, data: bytes) -> bool:
        connection, request, size = self._connection, known.request, len(data)
        began = self._held_since or perf_counter()
        reader = connection.reader
        if not reader.between_requests or reader.incomplete_bytes or connection.active is not None:
            return False
        if connection.scheduler.rest or (size != known.request_size and size != len(known.data)):
            return False
        if size != known.request_size:
            self._held_head, self._held_since = known.data, began
            connection.deadline.set(connection.settings.body_timeout_seconds, self._refuse_held)
            return True
        connection.deadline.clear()
        connection.active, request.answer_begun = request, False
        if self._begin_known(request, data[len(known.data) :], began):
            self._held_since = 0.0
            return True
        connection.active = None
        return False

    def _begin_known(self, request: IncomingRequest, body: bytes, began: float) -> bool:
        """Answer a request with the known head from its template; return False if a check fails."""
        template, caller = self._find(request), request.caller
        if template is None or caller is None:
            return False
        context = RequestContext(request.request_id, began)
        context.received, context.read = len(body), perf_counter() - began
        context.target = request.target
        return caller.run(self._responder.answer_by_template, template, request, body, context)

    def accepts(self, request: IncomingRequest) -> bool:
        """Return whether the connection answers a request itself; set the request's fields for that."""
        dispatcher, connection = self._dispatcher, self._connection
        route = dispatcher.route(request.url) if request.method == b"POST" and request.version == "1.1" else None
        if route is None:
            return False
        request.client, request.scheme = connection.client, connection.scheme
        if self._proxies is not None:
            _apply_proxy_headers(self._proxies, request)
        if dispatcher.templates is not None:
            # A route without a model takes texts, which vary in length.
            left_out = (CREDENTIAL,) if route.name else (CREDENTIAL, LENGTH)
            request.key = (request.url, *(header for header in request.headers if header[0] not in left_out))
            request.key_changes = dispatcher.changes()
            request.caller = dispatcher.caller_context(request.headers, request.client)
        if not (route.name and self._has_template(request)) and not self._may_answer(request):
            return False
        request.route = route
        request.target = "POST", route.path, request.client[0] if request.client else ""
        return True

    def _may_answer(self, request: IncomingRequest) -> bool:
        """Return whether the body is short, the host allowed, and no header belongs to the application.

        The key of a template holds the host, so a request with a template needs no check.
        """
        headers = dict(request.headers)
        length = headers.get(b"content-length", b"")
        is_short = 0 < len(length) <= 6 and int(length) <= MAX_BODY_BYTES
        simple = is_short and headers.keys().isdisjoint(APPLICATION_HEADERS)
        return simple and self._dispatcher.hosts.allow(headers.get(b"host"))

    def _has_template(self, request: IncomingRequest) -> bool:
        templates = self._dispatcher.templates
        return templates is not None and request.caller is not None and request.key in templates

    def answer(self, request: IncomingRequest, first_input: bytes) -> None:
        """Answer an accepted request with a complete body.

        Args:
            request: the request.
            first_input: the first bytes received for it; empty if they are not kept.

        """
        body = b"".join(request.chunks)
        request.chunks = []
        request.request_id = find_request_id(request.identifying)
        context = RequestContext(request.request_id, request.began)
        context.received, context.read = len(body), perf_counter() - request.began
        context.target = request.target
        template, caller, respond = self._find(request), request.caller, self._responder.answer_by_template
        if template is not None and caller is not None and caller.run(respond, template, request, body, context):
            self._remember(request, first_input, len(body))
            return
        assert request.route is not None
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": request.route.path,
            "query_string": request.route.query,
            "headers": [*request.headers, *request.identifying],
            "client": request.client,
            "scheme": request.scheme,
        }
        self._responder.answer(RawRequest(scope, refuse_receive, body), request, context)

    def send_internal_error(self, request: IncomingRequest, context: RequestContext) -> None:
        """Answer a request with status 500."""
        path = request.url.partition(b"?")[0].decode("latin-1")
        self._responder.send_internal_error(path, context)

    def _find(self, request: IncomingRequest) -> Template | None:
        """Return the template of a complete request; None without one, or if its caller needs a new check.

        Before the body, a template would keep a replaced model open.
        """
        templates = self._dispatcher.templates
        if templates is None or request.caller is None or self._dispatcher.changes() != request.key_changes:
            return None
        return request.caller.run(templates.find, request.key)

    def _remember(self, request: IncomingRequest, first_input: bytes, body_size: int) -> None:
        """Remember the head of a request that arrived alone, with its whole body or before it."""
        head, end, rest = first_input.partition(HEAD_END)
        # An empty line may precede a request; it ends no head.
        if end and head.startswith(BEGIN) and len(rest) in (0, body_size) and request.keep_alive:
            head += end
            if len(head) > MAX_IDLE_HEAD_BYTES:
                return
            self._known = KnownHead(head, len(head) + body_size, request)


def _apply_proxy_headers(proxies: ProxyHeadersMiddleware, request: IncomingRequest) -> None:
    """Set client and scheme from the headers of a trusted proxy."""
    scope: dict[str, Any] = {"type": "http", "client": request.client, "scheme": request.scheme}
    scope["headers"] = request.identifying
    with suppress(StopIteration):  # the middleware awaits nothing
        proxies(scope, refuse_receive, _null_app).send(None)  # type: ignore[arg-type]
    request.client, request.scheme = scope["client"], scope["scheme"]


async def refuse_receive() -> Any:
    """Stand in for the ASGI `receive` of a request with a complete body."""
    raise RuntimeError("the body was received already")


async def _null_app(*_: object) -> None:
    """Do nothing, as an application or as the ASGI `send`."""
