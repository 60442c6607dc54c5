"""Pages for browsers: `/inspect`, the inspector of models, and `/docs`, the documentation of `/openapi.json`.

They need no API key: they hold no data of a model, and ask for the key when they send a request.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request

INSPECTOR, OPENAPI = "/inspect", "/openapi.json"
ASSETS = Path(__file__).parent.parent / "inspector"
MEDIA_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
INSPECTOR_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content-Security-Policy of the inspector: files and requests of its own origin alone."""
DOCS_POLICY = (
    "default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the documentation. Swagger UI sets styles inline; `scripts` are the hashes of its own."""
PRIVATE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def router(title: str, describe: Callable[[], dict[str, Any]], static_url: str, inspector: bool) -> APIRouter:
    """Return the router of the pages.

    Args:
        title: of the documentation.
        describe: returns the OpenAPI document, once for all requests.
        static_url: path of the files of Swagger UI.
        inspector: whether to serve the inspector.

    """
    routes = APIRouter(include_in_schema=False)

    @lru_cache  # building and writing the document takes 20 ms
    def write_document(root: str) -> bytes:
        return orjson.dumps(describe() | ({"servers": [{"url": root}]} if root else {}))

    @routes.get(OPENAPI)
    async def openapi(request: Request) -> Response:
        root = request.scope.get("root_path", "").rstrip("/")
        return Response(write_document(root), media_type="application/json")

    @routes.get("/docs")
    async def docs(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        page = get_swagger_ui_html(
            openapi_url=f"{root}{OPENAPI}",
            title=title,
            swagger_js_url=f"{root}{static_url}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{static_url}/swagger-ui.css",
            swagger_favicon_url=f"{root}{static_url}/favicon.png",
        )
        scripts = INLINE_SCRIPT.findall(bytes(page.body))
        policy = DOCS_POLICY.format(scripts=" ".join(f"'sha256-{_digest(script)}'" for script in scripts))
        page.headers.update({"Content-Security-Policy": policy, **PRIVATE})
        return page

    if not inspector:
        return routes
    assets = _read_assets()

    @routes.get(INSPECTOR)
    async def inspect(request: Request) -> Response:
        return _answer_asset(request, assets, "index.html")

    @routes.get(INSPECTOR + "/{name}")
    async def asset(request: Request, name: str) -> Response:
        return _answer_asset(request, assets, name)

    return routes


def _read_assets() -> dict[str, bytes]:
    """Return the files of the inspector by name, about 60 kB together."""
    return {file.name: file.read_bytes() for file in ASSETS.iterdir() if file.suffix[1:] in MEDIA_TYPES}


def _answer_asset(request: Request, assets: Mapping[str, bytes], name: str) -> Response:
    """Answer with a file, or 304 if the browser has the same bytes."""
    if name not in assets:
        raise HTTPException(404)
    headers = {"ETag": f'"{_digest(assets[name])}"', "Cache-Control": "no-cache", **PRIVATE}
    headers["Content-Security-Policy"] = INSPECTOR_POLICY
    # A compressing proxy marks the tag as weak; the comparison ignores this (RFC 9110, section 13.1.2).
    known = [tag.strip().removeprefix("W/") for tag in ",".join(request.headers.getlist("If-None-Match")).split(",")]
    if headers["ETag"] in known or known == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(assets[name], headers=headers, media_type=MEDIA_TYPES[name.rpartition(".")[2]])


def _digest(content: bytes) -> str:
    return base64.b64encode(hashlib.sha256(content).digest()).decode()
