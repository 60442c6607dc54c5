"""The way in: requests for tensors are dispatched here, all others by FastAPI, whose routing costs more than a small
answer. Both use the same handlers, so that a request is answered in the same way by either.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from incipit.service.api import problems
from incipit.service.errors import IncipitError

LOG = logging.getLogger(__name__)

Handler = Callable[[Request, str, str | None], Awaitable[Response]]
"""Answers a request for a model, by its name and its version, if one is named."""


class Entry:
    """The application as a server sees it.

    Args:
        app: answers what is not dispatched here.
        handlers: what stands before the name of a model in a path, and what ends it -> what answers a POST to it.

    """

    def __init__(self, app: FastAPI, handlers: Mapping[tuple[str, str], Handler]) -> None:
        self.app = app
        self._handlers = {end: (begin, handler) for (begin, end), handler in handlers.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or whatever else the server tells (ASGI 3)."""
        if scope["type"] == "http" and scope["method"] == "POST":
            begin, _, end = scope["path"].rpartition("/")
            found = self._handlers.get(end)
            if found and begin.startswith(found[0]):
                name, versioned, version = begin[len(found[0]) :].partition("/versions/")
                if name and "/" not in name + version and bool(versioned) == bool(version):
                    await _answer(found[1], Request(scope, receive), name, version or None, send)
                    return
        await self.app(scope, receive, send)


async def _answer(handler: Handler, request: Request, name: str, version: str | None, send: Send) -> None:
    try:
        response = await handler(request, name, version)
    except IncipitError as error:
        response = problems.respond(error, request.url.path)
    except Exception:
        LOG.exception("a request failed in an unforeseen way")
        response = problems.unforeseen(request.url.path)
    await response(request.scope, request.receive, send)
