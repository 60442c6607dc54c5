"""Dispatches requests for tensors itself, and hands all others to FastAPI: its routing costs more than a small answer.
Both use the same handlers and give the same answers.
"""

import logging
from collections.abc import Callable, Mapping
from contextvars import Context
from functools import lru_cache
from time import perf_counter
from types import MappingProxyType

from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from preblock.service.api.http import errors
from preblock.service.api.http.request import Handler, RawRequest, Route
from preblock.service.api.http.response import Headers
from preblock.service.api.http.tracing import ROUTE, traced
from preblock.service.api.request_cache import TemplateCache
from preblock.service.core.auth import EVERYBODY, Authenticator
from preblock.service.core.errors import Forbidden, PreblockError
from preblock.service.core.settings import split_list
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.observability.context import CURRENT_REQUEST, Begin, RequestContext

LOG = logging.getLogger(__name__)

OPEN = frozenset({"/livez", "/readyz", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no key: an orchestrator that starts, stops and watches the service has none."""
METHODS = ("GET", "POST")
EXPOSED = (
    *("Preblock-Model", "Preblock-Version", "Preblock-Output", "Preblock-Shape", "Preblock-Dtype"),
    *("Inference-Header-Content-Length", "Retry-After", "WWW-Authenticate", "X-Request-Id", "Server-Timing"),
)
"""Headers of an answer that a page may read."""
CountBytes = Callable[[str, int, int, float, float], None]
HEADS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""Messages of ASGI with the headers of an answer."""


class Dispatcher:
    """The application as a server sees it.

    Args:
        app: answers all other requests.
        handlers: beginning and end of a path around the name of a model -> handler of a POST to it.
        access: lets callers in; default: everybody.
        origins: of pages that browsers let ask, or "*"; default: none but those of this server.
        templates: of answered requests; default: no cache.
        count_bytes: counts the bytes that a protocol received and sent, and the seconds of both; default: nothing does.
        trace: traces requests; default: nothing does.

    """

    def __init__(
        self,
        app: ASGIApp,
        handlers: Mapping[tuple[str, str], Handler],
        access: Authenticator = EVERYBODY,
        settings: LiveSettings | None = None,
        templates: TemplateCache | None = None,
        count_bytes: CountBytes = lambda *_: None,
        trace: Begin | None = None,
    ) -> None:
        self.app = app
        self.count_bytes = count_bytes
        self.trace = trace
        self._access = access
        self.templates = templates
        self._settings = settings
        self._allow_origins(None)
        self._handlers = {end: (begin, handler) for (begin, end), handler in handlers.items()}
        self.target = lru_cache(self._target)  # a client asks the same again and again

    def _allow_origins(self, text: str | None) -> None:
        """Let pages of these origins send requests; the setting `cors_origins` has this text."""
        self._cors_origins, origins = text, split_list(text)
        self._origins = origins
        # Outermost, so that a page can read why it was refused. It adds headers, and sees no body.
        self._cors = (
            CORSMiddleware(self._admit, origins, allow_methods=METHODS, allow_headers=["*"], expose_headers=EXPOSED)
            if origins
            else None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or another event of the server (ASGI 3)."""
        if self._settings is not None and self._settings.current.cors_origins != self._cors_origins:
            self._allow_origins(self._settings.current.cors_origins)
        app = self._admit if self._cors is None else self._cors
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        passage = _MeteredChannel(RequestContext.of(scope["headers"]), receive, send, self.count_bytes)
        CURRENT_REQUEST.set(passage.visit)
        if self.trace is None or scope["path"] in OPEN:
            await app(scope, passage.receive, passage.send)
        else:
            await traced(app, self.trace, passage.visit, scope, passage.receive, passage.send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of an allowed page, or of no page."""
        try:
            self._let_in(scope)
        except PreblockError as error:
            await refuse(error, scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "POST" and (target := self._find(scope["path"])):
            scope[ROUTE] = target.route
            arrival = RawRequest(scope, receive)
            response = await _answer(arrival, target)
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def answer(self, arrival: RawRequest, target: Route) -> Response:
        """Answer a request of no page for a known target."""
        try:
            self._let_in(arrival.scope)
        except PreblockError as error:
            return errors.respond(error, arrival.path)
        return await _answer(arrival, target)

    def admitted(self, headers: Headers, client: tuple[str, int] | None) -> Context | None:
        """Return a context with the caller of a request of no page; None where the caller is refused.

        `headers` are as they came, and `client` is its address.
        """
        context = Context()
        try:
            context.run(self._name, headers, client)
        except PreblockError:
            return None
        return context

    def changes(self) -> int:
        """Return a number that grows when the keys change: a caller must then be checked again."""
        self._access.reload()
        return self._access.changes

    def _target(self, address: bytes) -> Route | None:
        """Return the route of a POST to an address of a request line, if it is for a tensor."""
        if not address.startswith(b"/") or b"%" in address or b"#" in address or not address.isascii():
            return None
        path, _, query = address.partition(b"?")
        target = self._find(path.decode())
        return target and target._replace(path=path.decode(), query=query)

    def _find(self, path: str) -> Route | None:
        """Return the route of a POST to `path`, if it is for a tensor."""
        begin, _, end = path.rpartition("/")
        found = self._handlers.get(end)
        if found and begin.startswith(found[0]):
            name, versioned, version = begin[len(found[0]) :].partition("/versions/")
            if name and "/" not in name + version and bool(versioned) == bool(version):
                route = f"{found[0]}{{name}}{'/versions/{version}' if version else ''}/{end}"
                return Route(found[1], name, version or None, route)
        return None

    def _let_in(self, scope: Scope) -> None:
        """Raise Forbidden or Unauthenticated for a caller without access, and name the others."""
        if scope["type"] == "lifespan":
            return
        headers = scope["headers"]
        if scope["type"] == "websocket" and (origin := _header(headers, b"origin")) is not None:
            self._check_origin(origin.decode("latin-1"), headers)
        if scope["path"] not in OPEN:
            self._name(headers, scope.get("client"))

    def _name(self, headers: Headers, client: tuple[str, int] | None) -> None:
        """Name the caller by its key or its address; raise Unauthenticated where a key is needed and missing."""
        if self._access.needs_key:
            self._access.authenticate(_header(headers, b"authorization"))
        else:
            self._access.identify(client[0] if client else "")

    def _check_origin(self, origin: str, headers: Headers) -> None:
        """Raise Forbidden for a page of another server: a browser lets any page open a WebSocket, and names its
        origin."""
        own = (_header(headers, b"host") or b"").decode("latin-1")
        if origin.partition("://")[2] != own and origin not in self._origins and "*" not in self._origins:
            raise Forbidden("Origin", origin, ", ".join((f"that of {own}", *self._origins)))


class _MeteredChannel:
    """The ASGI channel of one request: it adds the headers of the request's context to the answer, and counts bytes."""

    def __init__(self, visit: RequestContext, receive: Receive, send: Send, count_bytes: CountBytes) -> None:
        self.visit, self._receive, self._send, self._count_bytes = visit, receive, send, count_bytes

    async def receive(self) -> Message:
        """Receive a message."""
        began = perf_counter()
        message = await self._receive()
        if protocol := self.visit.protocol:
            if message["type"] == "http.request":
                self._count_bytes(protocol, len(message.get("body", b"")), 0, perf_counter() - began, 0)
            elif message["type"] == "websocket.receive":  # the time of waiting is unknown for these
                self._count_bytes(protocol, len(message.get("bytes") or (message.get("text") or "").encode()), 0, 0, 0)
        return message

    async def send(self, message: Message) -> None:
        """Send a message."""
        if message["type"] in HEADS:
            message = {**message, "headers": [*message.get("headers", ()), *self.visit.headers()]}
        began = perf_counter()
        await self._send(message)
        if protocol := self.visit.protocol:
            content = message.get("body") or message.get("bytes") or (message.get("text") or "").encode()
            self._count_bytes(protocol, 0, len(content), 0, perf_counter() - began)


def _header(headers: Headers, wanted: bytes) -> bytes | None:
    """Return the value of the first header of a lower-case name."""
    return next((value for name, value in headers if name.lower() == wanted), None)


async def refuse(
    error: PreblockError, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Answer a request, or the opening of a WebSocket, with an error, and with further `headers`."""
    response = errors.respond(error, scope["path"])
    response.headers.update(headers)
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)


async def _answer(arrival: RawRequest, target: Route) -> Response:
    try:
        return await target.handler(arrival, target.name, target.version)
    except PreblockError as error:
        return errors.respond(error, arrival.path)
    except Exception:
        LOG.exception("a request failed in an unforeseen way")
        return errors.unforeseen(arrival.path)
