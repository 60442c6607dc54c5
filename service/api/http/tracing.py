"""Spans of HTTP requests and WebSockets, by the semantic conventions of OpenTelemetry."""

from starlette.types import ASGIApp, Receive, Scope, Send

from preblock.service.observability.context import Begin, Headers, RequestContext, SpanData

METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})


def start_span(
    begin: Begin, context: RequestContext, method: str, path: str, scheme: str, headers: Headers
) -> SpanData:
    """Start the span of a request or a stream; `end_span` must follow.

    The span omits the query, because a query may hold private data.
    """
    name = method if method in METHODS else "HTTP"
    known = name if name == method else "_OTHER"
    return begin(context, headers, name, {"http.request.method": known, "url.path": path, "url.scheme": scheme})


def set_status(trace: SpanData, status: int) -> None:
    """Set the status of the response."""
    trace.attributes["http.response.status_code"] = status
    trace.failed = trace.failed or status >= 500
    if status >= 400:  # an internal error has no other type
        trace.attributes.setdefault("error.type", str(status))


def set_route(trace: SpanData, route: str) -> None:
    """Add the path pattern of a request to its span."""
    trace.name, trace.attributes["http.route"] = f"{trace.name} {route}", route


def end_span(trace: SpanData, error: Exception | None) -> None:
    """End the span of a request. After an `error` the response is incomplete."""
    if error is not None:
        trace.set_error(type(error).__name__, failed=True)
    trace.end()


async def trace_request(
    app: ASGIApp, begin: Begin, context: RequestContext, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a request with an application, and trace it."""
    method = scope.get("method", "GET")  # a WebSocket opens with GET
    trace, failure = start_span(begin, context, method, scope["path"], scope["scheme"], scope["headers"]), None
    try:
        await app(scope, receive, send)
    except Exception as error:  # after the response has begun
        failure = error
        raise
    finally:
        if route := getattr(scope.get("route"), "path", None):  # else it is known, or no route has the path
            set_route(trace, route)
        end_span(trace, failure)
