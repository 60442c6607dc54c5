"""Serve canned bytes by plain uvicorn, as many as the path names. The argument is a port."""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

WIDTH = 768
CANNED = {f"/{b}/{n}": bytes(4 * b * n * WIDTH) for b, n in ((1, 1), (1, 128), (8, 128), (32, 512))}


async def app(
    scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Read a body, and answer."""
    while (await receive()).get("more_body"):
        pass
    content = CANNED[scope["path"]]
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


uvicorn.run(app, port=int(sys.argv[1]), access_log=False, log_level="warning", lifespan="off")
