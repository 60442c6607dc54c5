"""Answers while models are opened: the process lives, its progress, and "come again" to all other requests."""

import orjson
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from preblock.service.api.http.dispatcher import refuse
from preblock.service.core.auth import Authenticator, caller
from preblock.service.core.errors import Unavailable
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.load_progress import Progress

CLOSE = {"Connection": "close"}
"""A client's next request then reaches the service itself."""


class StartupApp:
    """The application of the start, until the models are open.

    Args:
        access: decides which callers see the name of a model.
        progress: how far the opening of models is.
        metrics: of the start.
        max_body_bytes: most bytes of a body that is read before the answer.

    """

    def __init__(self, access: Authenticator, progress: Progress, metrics: Metrics, max_body_bytes: int) -> None:
        self._access, self._progress, self._metrics = access, progress, metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI 3)."""
        match scope["path"] if scope["type"] == "http" else None:
            case "/livez":
                response = Response(headers=CLOSE)
            case "/v2/health/live":
                response = Response(b'{"live":true}', headers=CLOSE, media_type="application/json")
            case "/readyz":
                headers = CLOSE | {"Retry-After": str(Unavailable.retry_after)}
                response = Response(self._told(), 503, headers, media_type="application/json")
            case "/metrics":
                accept = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"), "")
                content, media_type = self._metrics.expose(accept)
                response = Response(content, headers=CLOSE | {"Content-Type": media_type})
            case _:
                await self._read(receive)
                got = f"{self._progress.ready} of {self._progress.of} models open"
                error = Unavailable("server", got, "a request once all of them are")
                await refuse(error, scope, receive, send, CLOSE)
                return
        await response(scope, receive, send)

    async def _read(self, receive: Receive) -> None:
        """Read and discard a body: a client that still sends would not see the answer."""
        read, message = 0, await receive()
        while message.get("more_body") and (read := read + len(message["body"])) <= self._max_body_bytes:
            message = await receive()

    def _told(self) -> bytes:
        """Return the progress; only a caller with access to a model sees its name."""
        model = self._progress.model
        return orjson.dumps(
            {
                "status": "starting",
                "ready": self._progress.ready,
                "of": self._progress.of,
                "model": model if model is not None and self._access.shows(model, caller()) else None,
            }
        )
