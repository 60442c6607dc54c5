"""A request of HTTP, or a WebSocket, as its span tells it, by the semantic conventions of OpenTelemetry."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preblock.service.observability.context import Begin, Headers, RequestContext, SpanData

ROUTE = "preblock.route"
"""Of a request, in its scope: the pattern of its path, where it was dispatched without FastAPI."""
METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
STATUS = {"http.response.start": None, "websocket.http.response.start": None, "websocket.accept": 101}
"""ASGI messages that begin an answer, and the status of each message without one."""


def begun(begin: Begin, visit: RequestContext, method: str, path: str, scheme: str, headers: Headers) -> SpanData:
    """Begin to trace a request, a stream as one span; `ended` must follow.

    The query is left out, since it may hold anything.
    """
    name = method if method in METHODS else "HTTP"
    known = name if name == method else "_OTHER"
    return begin(visit, headers, name, {"http.request.method": known, "url.path": path, "url.scheme": scheme})


def answered(trace: SpanData, status: int) -> None:
    """Set the status of the answer."""
    trace.attributes["http.response.status_code"] = status
    trace.failed = trace.failed or status >= 500
    if status >= 400:  # of an unforeseen error
        trace.attributes.setdefault("error.type", str(status))


def routed(trace: SpanData, route: str) -> None:
    """Set the path pattern of the request's route."""
    trace.name, trace.attributes["http.route"] = f"{trace.name} {route}", route


def ended(trace: SpanData, error: Exception | None) -> None:
    """End the span of a request; after an `error` no more of its answer came."""
    if error is not None:
        trace.set_error(type(error).__name__, failed=True)
    trace.end()


async def traced(app: ASGIApp, begin: Begin, visit: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
    """Let an application answer a request, and trace it."""
    method = scope.get("method", "GET")  # a WebSocket is opened so
    trace, failure = begun(begin, visit, method, scope["path"], scope["scheme"], scope["headers"]), None

    async def sent(message: Message) -> None:
        if message["type"] in STATUS:
            answered(trace, message.get("status", STATUS[message["type"]]))
        await send(message)

    try:
        await app(scope, receive, sent)
    except Exception as error:  # once the answer has begun
        failure = error
        raise
    finally:
        if route := scope.get(ROUTE) or getattr(scope.get("route"), "path", None):
            routed(trace, route)
        ended(trace, failure)
