"""Dispatches requests for tensors itself, and hands all others to FastAPI: its routing costs more than a small answer.
Both use the same handlers and give the same answers.
"""

import logging
from collections.abc import Callable, Mapping
from contextvars import Context
from functools import lru_cache
from time import perf_counter

from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preblock.service.api.http import errors
from preblock.service.api.http.request import Handler, RawRequest, Route
from preblock.service.api.http.response import Headers
from preblock.service.api.http.tracing import ROUTE, set_status, trace_request
from preblock.service.api.request_cache import TemplateCache
from preblock.service.core.auth import EVERYBODY, Authenticator
from preblock.service.core.errors import Forbidden, PreblockError
from preblock.service.core.settings import listed
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.observability.context import CURRENT_REQUEST, Begin, RequestContext

LOG = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no key: an orchestrator that starts, stops and watches the service has none."""
METHODS = ("GET", "POST")
EXPOSED_HEADERS = (
    *("Preblock-Model", "Preblock-Version", "Preblock-Output", "Preblock-Shape", "Preblock-Dtype"),
    *("Inference-Header-Content-Length", "Retry-After", "WWW-Authenticate", "X-Request-Id", "Server-Timing"),
)
"""Headers of an answer that a page may read."""
CountBytes = Callable[[str, int, int, float, float], None]
SWITCHING_PROTOCOLS = 101
"""Status of an accepted WebSocket; its ASGI message has none."""
START_MESSAGES = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
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
        self.route = lru_cache(self._route_of)  # a client asks the same again and again

    def _allow_origins(self, text: str | None) -> None:
        """Let pages of these origins send requests; the setting `cors_origins` has this text."""
        self._cors_origins, self._origins = text, listed(text)
        # Outermost, so that a page can also read a refusal.
        cors = CORSMiddleware(self._admit, self._origins, METHODS, allow_headers=["*"], expose_headers=EXPOSED_HEADERS)
        self._entry: ASGIApp = cors if self._origins else self._admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or another event of the server (ASGI 3)."""
        if self._settings is not None and self._settings.current.cors_origins != self._cors_origins:
            self._allow_origins(self._settings.current.cors_origins)
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        channel = _MeteredChannel(RequestContext.of(scope["headers"]), receive, send, self.count_bytes)
        CURRENT_REQUEST.set(channel.context)
        if self.trace is None or scope["path"] in PUBLIC_PATHS:
            await self._entry(scope, channel.receive, channel.send)
        else:
            await trace_request(self._entry, self.trace, channel.context, scope, channel.receive, channel.send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of an allowed page, or of no page."""
        route = self._find(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is not None:
            scope[ROUTE] = route.pattern
            response = await self.answer(RawRequest(scope, receive), route)
            await response(scope, receive, send)
            return
        try:
            self._authenticate(scope)
        except PreblockError as error:
            await refuse(error, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def answer(self, request: RawRequest, route: Route) -> Response:
        """Answer a request of no page for a known route."""
        try:
            self._authenticate(request.scope)
            return await route.handler(request, route.name, route.version)
        except PreblockError as error:
            return errors.respond(error, request.scope["path"])
        except Exception:
            LOG.exception("a request failed in an unforeseen way")
            return errors.internal_error(request.scope["path"])

    def caller_context(self, headers: Headers, client: tuple[str, int] | None) -> Context | None:
        """Return a context with the caller of a request of no page; None where the caller is refused.

        `headers` are as they came, and `client` is its address.
        """
        context = Context()
        try:
            context.run(self._identify, headers, client)
        except PreblockError:
            return None
        return context

    def changes(self) -> int:
        """Return a number that grows when the keys change: a caller must then be checked again."""
        self._access.look()
        return self._access.changes

    def _route_of(self, address: bytes) -> Route | None:
        """Return the route of a POST to an address of a request line, if it is for a tensor."""
        if not address.startswith(b"/") or b"%" in address or b"#" in address or not address.isascii():
            return None
        path, _, query = address.partition(b"?")
        return self._find(path.decode(), query)

    def _find(self, path: str, query: bytes = b"") -> Route | None:
        """Return the route of a POST to `path`, if it is for a tensor."""
        begin, _, end = path.rpartition("/")
        found = self._handlers.get(end)
        if found and begin.startswith(found[0]):
            name, versioned, version = begin[len(found[0]) :].partition("/versions/")
            if name and "/" not in name + version and bool(versioned) == bool(version):
                pattern = f"{found[0]}{{name}}{'/versions/{version}' if version else ''}/{end}"
                return Route(found[1], name, version or None, pattern, path, query)
        return None

    def _authenticate(self, scope: Scope) -> None:
        """Raise Forbidden or Unauthenticated for a caller without access, and name the others."""
        headers = scope["headers"]
        if scope["type"] == "websocket" and (origin := _header(headers, b"origin")) is not None:
            self._check_origin(origin.decode("latin-1"), headers)
        if scope["path"] not in PUBLIC_PATHS:
            self._identify(headers, scope.get("client"))

    def _identify(self, headers: Headers, client: tuple[str, int] | None) -> None:
        """Name the caller by its key or its address; raise Unauthenticated where a key is needed and missing."""
        if self._access.needs_key:
            self._access.enter(_header(headers, b"authorization"))
        else:
            self._access.came_from(client[0] if client else "")

    def _check_origin(self, origin: str, headers: Headers) -> None:
        """Raise Forbidden for a page of another server: a browser lets any page open a WebSocket, and names its
        origin."""
        own = (_header(headers, b"host") or b"").decode("latin-1")
        if origin.partition("://")[2] != own and origin not in self._origins and "*" not in self._origins:
            raise Forbidden("Origin", origin, ", ".join((f"that of {own}", *self._origins)))


class _MeteredChannel:
    """The ASGI channel of one request: it adds the headers of the request's context to the answer, and counts bytes."""

    def __init__(self, context: RequestContext, receive: Receive, send: Send, count_bytes: CountBytes) -> None:
        self.context, self._receive, self._send, self._count_bytes = context, receive, send, count_bytes

    async def receive(self) -> Message:
        """Receive a message."""
        began = perf_counter()
        message = await self._receive()
        if protocol := self.context.protocol:
            # A stream waits for its client, so its time says nothing.
            seconds = perf_counter() - began if message["type"] == "http.request" else 0.0
            self._count_bytes(protocol, _size_of(message), 0, seconds, 0)
        return message

    async def send(self, message: Message) -> None:
        """Send a message."""
        if message["type"] in START_MESSAGES:
            if self.context.trace is not None:
                set_status(self.context.trace, message.get("status", SWITCHING_PROTOCOLS))
            message = {**message, "headers": [*message.get("headers", ()), *self.context.headers()]}
        began = perf_counter()
        await self._send(message)
        if protocol := self.context.protocol:
            self._count_bytes(protocol, 0, _size_of(message), 0, perf_counter() - began)


def _size_of(message: Message) -> int:
    return len(message.get("body") or message.get("bytes") or (message.get("text") or "").encode())


def _header(headers: Headers, wanted: bytes) -> bytes | None:
    """Return the value of the first header of a lower-case name."""
    return next((value for name, value in headers if name.lower() == wanted), None)


async def refuse(
    error: PreblockError, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str] | None = None
) -> None:
    """Answer a request, or the opening of a WebSocket, with an error, and with further `headers`."""
    response = errors.respond(error, scope["path"])
    response.headers.update(headers or {})
    await response(scope, receive, send)
