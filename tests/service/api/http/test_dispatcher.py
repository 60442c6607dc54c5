"""The way in routes as FastAPI does, which it goes around for tensors."""

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from preblock.service.api.http import errors
from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.request import RawRequest


async def handler(_: RawRequest | Request, name: str, version: str | None) -> Response:
    if name == "broken":
        raise RuntimeError("a secret")
    return PlainTextResponse(f"{name} {version}")


def routed() -> FastAPI:
    """The same handler behind FastAPI's own routing."""
    app = FastAPI()
    errors.install(app)
    for path in ("/models/{name}/embed", "/models/{name}/versions/{version}/embed"):

        @app.post(path)
        async def embed(request: Request, name: str, version: str | None = None) -> Response:
            return await handler(request, name, version)

    return app


def answer(app: Any, path: str) -> tuple[int, bytes]:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, headers={"X-Request-Id": "one"})

    found = asyncio.run(ask())
    return found.status_code, found.content.replace(b',"request_id":"one"', b"")  # of the dispatcher alone


PATHS = (
    *("/models/a/embed", "/models/a/versions/2/embed", "/models/a%20b/embed", "/models/versions/embed"),
    *("/models/versions/versions/1/embed", "/models//embed", "/models/a/versions/embed", "/models/a/embed/"),
    *("/models/a/b/embed", "/models/a%2Fb/embed", "/models/a/versions//embed", "/models/a/versions/1/2/embed"),
    "/models/broken/embed",
)


def test_dispatcher_routes_like_fastapi() -> None:
    handlers: Any = {("/models/", "embed"): handler}
    for path in PATHS:
        assert answer(Dispatcher(routed(), handlers), path) == answer(routed(), path), path
    assert answer(Dispatcher(FastAPI(), handlers), PATHS[1]) == (200, b"a 2")
    assert b"secret" not in answer(routed(), PATHS[-1])[1]
