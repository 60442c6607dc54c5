"""A request of HTTP, or a WebSocket, as its span tells it, by the semantic conventions of OpenTelemetry."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Message, Scope, Send

from incipit.service.visit import Begin, Visit

ROUTE = "incipit.route"
"""Of a request, in its scope: the pattern of its path, where it was dispatched without FastAPI."""
METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
STATUS = {"http.response.start": None, "websocket.http.response.start": None, "websocket.accept": 101}
"""Messages of ASGI that begin an answer, and the statuses of those that state none."""


@contextmanager
def traced(begin: Begin, visit: Visit, scope: Scope) -> Iterator[Callable[[int], None]]:
    """Trace a request, a stream as a whole, while the block runs; what is yielded is told the status of its answer.

    The query is left out, since it may hold anything.
    """
    method = scope.get("method", "GET")  # a WebSocket is opened so
    name = method if method in METHODS else "HTTP"
    said = {
        "http.request.method": method if method in METHODS else "_OTHER",
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
    }
    with begin(visit, scope["headers"], name, said) as trace:

        def answered(status: int) -> None:
            trace.attributes["http.response.status_code"] = status
            trace.failed = trace.failed or status >= 500
            if status >= 400:  # of an error that no door has named
                trace.attributes.setdefault("error.type", str(status))

        try:
            yield answered
        except Exception as error:  # once the answer has begun
            trace.refused(type(error).__name__, failed=True)
            raise
        finally:
            if route := scope.get(ROUTE) or getattr(scope.get("route"), "path", None):
                trace.name, trace.attributes["http.route"] = f"{name} {route}", route


def telling(answered: Callable[[int], None], send: Send) -> Send:
    """Return what sends messages by `send`, and tells the status of an answer."""

    async def sent(message: Message) -> None:
        if message["type"] in STATUS:
            answered(message.get("status", STATUS[message["type"]]))
        await send(message)

    return sent
