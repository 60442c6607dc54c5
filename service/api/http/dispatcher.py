"""The ASGI application: routes tensor requests itself, and hands all other requests to FastAPI.

FastAPI's routing costs more than a small response. Both routes use the same handlers and give the same responses.
"""

import logging
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter

from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preblock.service.api.http import errors
from preblock.service.api.http.origins import AllowedHosts, check_origin
from preblock.service.api.http.request import Handler, RawRequest, Route
from preblock.service.api.http.response import KnownHttpRequest
from preblock.service.api.http.schemas.native_api import ROW_HEADERS
from preblock.service.api.http.tracing import set_route, set_status, trace_request
from preblock.service.api.prepared import PreparedRequests
from preblock.service.api.streams import StreamRegistry
from preblock.service.core.auth import EVERYBODY, Authenticator
from preblock.service.core.errors import Misdirected, PreblockError
from preblock.service.core.settings import LiveSettings, split_list
from preblock.service.engine.admission import Limits
from preblock.service.observability.context import CURRENT_REQUEST, Begin, Headers, RequestContext

LOG = logging.getLogger(__name__)

LIVE_PATHS = ("/livez", "/v2/health/live")
"""Spellings of liveness: 200 while a process runs."""
READY_PATHS = ("/readyz", "/health", "/ping", "/v2/health/ready")
"""Spellings of readiness. vLLM, text-embeddings-inference and infinity have `/health`, SageMaker has `/ping`."""
HEALTH_PATHS = frozenset((*LIVE_PATHS, *READY_PATHS))
"""Paths without authentication and traces, because an orchestrator has no API key."""
INDEX_PATH = "/"
"""Its route checks the key itself, because it sends browsers to a page before."""
TEI_PATH = "/embed"
"""The path that POST to the index stands for, with its check of the key and its form of errors."""
PAGE_PATHS = frozenset({"/docs", "/inspect", "/openapi.json"})
STATIC_DOCUMENTS = "/docs/static"
PAGE_FILES = (f"{STATIC_DOCUMENTS}/", "/inspect/")
"""Files of the pages. A browser opens a page without a key, and the page asks for the key."""
METHODS = ("GET", "HEAD", "POST")
EXPOSED_HEADERS = (
    *(*ROW_HEADERS, "Preblock-Ignored", "Inference-Header-Content-Length"),
    *("Retry-After", "WWW-Authenticate", "X-Request-Id", "Server-Timing"),
)
"""Response headers readable by a web page."""
CountBytes = Callable[[str, int, int, float, float], None]
"""Counts, for a protocol, the bytes received and sent, and the seconds of reading and writing."""
START_MESSAGES = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""ASGI messages with response headers."""
NO_LIFESPAN = (
    "this ASGI server runs no lifespan, so changed API keys, settings and models have no effect before a restart, and "
    "gRPC does not serve; turn its lifespan on"
)


@dataclass(frozen=True)
class Services:
    """What Preblock's own server uses of the application, beside its answers.

    Args:
        settings: limits of connections.
        limits: with the memory of large bodies and responses.
        streams: to end at shutdown; default: none.

    """

    settings: LiveSettings
    limits: Limits
    streams: StreamRegistry | None = None

    @classmethod
    def without_engine(cls, settings: LiveSettings) -> "Services":
        """Return the services for an application that has no limits of its own."""
        return cls(settings, Limits(settings))


def is_public(path: str) -> bool:
    """Return whether a path needs no API key."""
    return path in HEALTH_PATHS or path in PAGE_PATHS or path.startswith(PAGE_FILES)


class Dispatcher:
    """The ASGI application of the service.

    Args:
        app: answers all requests except those to `handlers`.
        handlers: handlers of POST requests, by prefix and last segment of their path. If the prefix ends in a slash,
            the model name stands between them.
        access: authenticates callers; default: everybody is allowed.
        services: for the server; default: none, and no CORS.
        prepared: cache of prepared requests; default: no cache.
        count_bytes: counts bytes and seconds; default: no counting.
        trace: starts the span of a request; default: no tracing.
        hosts: hosts that requests may address; default: any.

    """

    def __init__(
        self,
        app: ASGIApp,
        handlers: Mapping[tuple[str, str], Handler],
        access: Authenticator = EVERYBODY,
        services: Services | None = None,
        prepared: PreparedRequests[KnownHttpRequest] | None = None,
        count_bytes: CountBytes = lambda *_: None,
        trace: Begin | None = None,
        hosts: AllowedHosts | None = None,
    ) -> None:
        self.app = app
        self.count_bytes = count_bytes
        self.trace = trace
        self.hosts = hosts or AllowedHosts()
        self.access = access
        self._expects_lifespan = True
        self.prepared = prepared
        self.services = services
        self._allow_origins(None)
        self._handlers = {end: (begin, handler) for (begin, end), handler in handlers.items()}
        self.route = lru_cache(self._route_of)  # clients repeat their URLs

    def _allow_origins(self, text: str | None) -> None:
        """Apply the setting `cors_origins`."""
        self._cors_origins, self._origins = text, split_list(text)
        # Outermost, so that a web page can also read an authentication error.
        cors = CORSMiddleware(self._admit, self._origins, METHODS, allow_headers=["*"], expose_headers=EXPOSED_HEADERS)
        self._entry: ASGIApp = cors if self._origins else self._admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, a WebSocket or the lifespan of the server (ASGI 3)."""
        if self.services is not None and self.services.settings.current.cors_origins != self._cors_origins:
            self._allow_origins(self.services.settings.current.cors_origins)
        if scope["type"] == "lifespan":
            self._expects_lifespan = False
            await self.app(scope, receive, send)
            return
        if self._expects_lifespan:
            self._expects_lifespan = False
            LOG.warning(NO_LIFESPAN)
        channel = _MeteredChannel(RequestContext.of(scope["headers"]), receive, send, self.count_bytes)
        client = scope.get("client")
        channel.context.target = scope.get("method", "GET"), scope["path"], client[0] if client else ""
        CURRENT_REQUEST.set(channel.context)
        if scope["path"] == INDEX_PATH and scope.get("method") == "POST":
            scope = {**scope, "path": TEI_PATH}
        try:
            if self.trace is None or scope["path"] in HEALTH_PATHS:
                await self._enter(scope, channel.receive, channel.send)
            else:
                await trace_request(self._enter, self.trace, channel.context, scope, channel.receive, channel.send)
        finally:
            channel.context.release()

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request after the check of its host."""
        try:
            self.hosts.check(scope["headers"])
        except Misdirected as error:
            await errors.respond(error, scope["path"])(scope, receive, send)
        else:
            await self._entry(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request after the CORS checks."""
        route = self._find(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is not None:
            request = CURRENT_REQUEST.get()
            if request is not None and request.trace is not None:
                set_route(request.trace, route.pattern)
            response = await self.answer(RawRequest(scope, receive), route)
            await response(scope, receive, send)
            return
        try:
            self._authenticate(scope)
        except PreblockError as error:
            await errors.respond(error, scope["path"])(scope, receive, send)
        else:
            if scope["type"] == "http" and scope["method"] == "HEAD":
                await answer_head(self.app, scope, receive, send)
            else:
                await self.app(scope, receive, send)

    async def answer(self, request: RawRequest, route: Route) -> Response:
        """Authenticate and answer a tensor request, without the CORS checks."""
        try:
            self._authenticate(request.scope)
            return await route.handler(request, route.name, route.version)
        except PreblockError as error:
            return errors.respond(error, request.scope["path"])
        except Exception:
            LOG.exception("internal error in a request; the client received status 500")
            return errors.internal_error(request.scope["path"])

    def caller_context(self, headers: Headers, client: tuple[str, int] | None) -> Context | None:
        """Return a context with the authenticated caller of a request; None if authentication fails.

        Args:
            headers: request headers, with names in any case.
            client: host and port of the client.

        """
        context = Context()
        try:
            context.run(self._identify, headers, client)
        except PreblockError:
            return None
        return context

    def _route_of(self, address: bytes) -> Route | None:
        """Return the tensor route of a POST to the target of a request line; None for any other path."""
        if not address.startswith(b"/") or b"%" in address or b"#" in address or not address.isascii():
            return None
        path, _, query = address.partition(b"?")
        return self._find(path.decode(), query)

    def _find(self, path: str, query: bytes = b"") -> Route | None:
        """Return the tensor route of a POST to `path`; None for any other path."""
        begin, _, end = path.rpartition("/")
        found = self._handlers.get(end)
        if found and not found[0].endswith("/"):
            return Route(found[1], "", None, path, path, query) if begin == found[0] else None
        if found and begin.startswith(found[0]):
            name, versioned, version = begin[len(found[0]) :].partition("/versions/")
            if name and "/" not in name + version and bool(versioned) == bool(version):
                pattern = f"{found[0]}{{name}}{'/versions/{version}' if version else ''}/{end}"
                return Route(found[1], name, version or None, pattern, path, query)
        return None

    def _authenticate(self, scope: Scope) -> None:
        """Set the caller of a request. Raise Forbidden or Unauthenticated if access is denied."""
        check_origin(scope, self._origins)
        if not is_public(scope["path"]) and scope["path"] != INDEX_PATH:
            self._identify(scope["headers"], scope.get("client"))

    def _identify(self, headers: Headers, client: tuple[str, int] | None) -> None:
        """Set the caller from its API key, or from its address without keys. Raise Unauthenticated for a bad key."""
        if self.access.needs_key:
            self.access.authenticate(_header(headers, b"authorization"))
        else:
            self.access.identify(client[0] if client else "")


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer HEAD as `app` answers GET, without the body (RFC 9110, section 9.3.2). No route declares it."""

    async def send_without_body(message: Message) -> None:
        await send(message if message["type"] != "http.response.body" else {**message, "body": b""})

    get = {**scope, "method": "GET"}
    await app(get, receive, send_without_body)
    if "route" in get:
        scope["route"] = get["route"]  # for the span of the request


class _MeteredChannel:
    """The ASGI channel of one request. It adds the headers of the request context, and counts bytes."""

    def __init__(self, context: RequestContext, receive: Receive, send: Send, count_bytes: CountBytes) -> None:
        self.context, self._receive, self._send, self._count_bytes = context, receive, send, count_bytes

    async def receive(self) -> Message:
        """Receive a message."""
        began = perf_counter()
        message = await self._receive()
        if protocol := self.context.protocol:
            # For a WebSocket this time is mostly waiting for the client.
            seconds = perf_counter() - began if message["type"] == "http.request" else 0.0
            self._count_bytes(protocol, _size_of(message), 0, seconds, 0)
        return message

    async def send(self, message: Message) -> None:
        """Send a message."""
        if message["type"] in START_MESSAGES:
            self.context.set_status(message.get("status", 101))  # only an accepted WebSocket has none
            if self.context.trace is not None:
                set_status(self.context.trace, message.get("status", 101))
            message = {**message, "headers": [*message.get("headers", ()), *self.context.headers()]}
        began = perf_counter()
        await self._send(message)
        if protocol := self.context.protocol:
            self._count_bytes(protocol, 0, _size_of(message), 0, perf_counter() - began)


def _size_of(message: Message) -> int:
    text = message.get("text")
    if not text:
        return len(message.get("body") or message.get("bytes") or b"")
    return len(text) if text.isascii() else len(text.encode())  # a copy of long text takes milliseconds


def _header(headers: Headers, wanted: bytes) -> bytes | None:
    """Return the first header with a lower-case name."""
    return next((value for name, value in headers if name.lower() == wanted), None)
