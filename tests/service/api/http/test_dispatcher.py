"""The way in answers as FastAPI does, which it goes around for tensors."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from preblock.service.api.http import errors
from preblock.service.api.http.dispatcher import Dispatcher
from preblock.service.api.http.request import RawRequest
from preblock.service.core.errors import Invalid


async def handler(_: RawRequest | Request, name: str, version: str | None) -> Response:
    if name == "wrong":
        raise Invalid("model", name, "another")
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


def answer(app: Any, method: str, path: str) -> tuple[int, str | None, bytes]:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers={"X-Request-Id": "one"})

    found = asyncio.run(ask())
    content = found.content.replace(b',"request_id":"one"', b"")  # which FastAPI alone knows nothing of
    return found.status_code, found.headers.get("content-type"), content


PATHS = (
    *("/models/a/embed", "/models/a/versions/2/embed", "/models/a%20b/embed", "/models/versions/embed"),
    *("/models/versions/versions/1/embed", "/models/wrong/embed", "/models/broken/embed", "/models//embed"),
    *("/models/a/b/embed", "/models/a%2Fb/embed", "/models/a/versions//embed", "/models/a/versions/1/2/embed"),
    *("/models/a/versions/embed", "/models/a/embed/", "/model/a/embed", "/embed"),
)


def test_dispatcher_routes_like_fastapi() -> None:
    app = routed()
    entry = Dispatcher(app, {("/models/", "embed"): handler})
    for method in ("POST", "GET"):
        for path in PATHS:
            assert answer(entry, method, path) == answer(app, method, path), (method, path)


def test_dispatcher_bypasses_fastapi_for_tensors(caplog: pytest.LogCaptureFixture) -> None:
    entry = Dispatcher(FastAPI(), {("/models/", "embed"): handler})
    assert answer(entry, "POST", "/models/a/embed")[::2] == (200, b"a None")
    status, _, content = answer(entry, "POST", "/models/broken/embed")
    assert (status, b"secret" in content, "a secret" in caplog.text) == (500, False, True)
