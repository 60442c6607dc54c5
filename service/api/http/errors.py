"""Errors as HTTP responses. No other module maps errors to status codes."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.requests import HTTPConnection
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Mount
from starlette.types import Receive, Scope, Send

from preblock.service.codecs import tei
from preblock.service.codecs.openai import error_body, error_document
from preblock.service.core import errors
from preblock.service.observability.context import CURRENT_REQUEST

STATUS: dict[type[errors.PreblockError], int] = {
    errors.Malformed: 400,
    errors.Invalid: 422,
    errors.Unauthenticated: 401,
    errors.NotFound: 404,
    errors.Forbidden: 403,
    errors.Conflict: 409,
    errors.Misdirected: 421,
    errors.TooLarge: 413,
    errors.RateLimited: 429,
    errors.UnsupportedFormat: 415,
    errors.NotAcceptable: 406,
    errors.Unavailable: 503,
    errors.ArtifactError: 500,
    errors.ProviderError: 500,
}
METHODS = ("GET", "HEAD", "POST", "OPTIONS")
MEDIA_TYPE = "application/problem+json"
OPEN_INFERENCE = "/v2"
"""Path prefix of the Open Inference Protocol. Its errors are `{"error": "…"}`."""
OPENAI = "/v1"
"""Path prefix of the OpenAI API. Its errors are `{"error": {"message": "…", …}}`."""
TEI, TEI_ROOT = "/tei/", frozenset({"/embed", "/embed_all", "/info", "/tokenize"})
"""Path prefix and paths of text-embeddings-inference. Its errors are `{"error": "…", "error_type": "…"}`."""


def status_of(error: errors.PreblockError, path: str) -> int:
    """Return the status of an error in the protocol of `path`."""
    if path.startswith(OPEN_INFERENCE) and isinstance(error, errors.Invalid):  # as in Triton and KServe
        return 400
    # OpenAI's clients know one status for all values that are not allowed.
    is_value = isinstance(error, errors.Invalid) or (isinstance(error, errors.TooLarge) and error.field != "body")
    if path.startswith(OPENAI) and is_value:
        return 400
    return STATUS[type(error)]


def problem(error: errors.PreblockError) -> bytes:
    """Return the error as a problem document (RFC 9457), with the field, the value got and the value expected.

    In a stream it also holds `retry_after`, because a step has no headers.
    """
    document = _problem_document(error)
    if error.retry_after is not None:
        document["retry_after"] = error.retry_after
    return orjson.dumps(document)


def respond(error: errors.PreblockError, path: str) -> Response:
    """Return the error in the format of the protocol of `path`."""
    response = _respond(path, status_of(error, path), "", str(error), error)
    if isinstance(error, errors.Unauthenticated):
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def internal_error(path: str) -> Response:
    """Return the response to an unexpected exception, in the format of the protocol of `path`."""
    return _respond(path, 500, "Internal Server Error", errors.INTERNAL_ERROR_MESSAGE)


def install(app: FastAPI) -> None:
    """Make `app` answer every error in the format of its protocol."""

    @app.exception_handler(errors.PreblockError)
    async def preblock_error(request: HTTPConnection, error: errors.PreblockError) -> Response:
        return respond(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: HTTPConnection, error: HTTPException) -> Response:
        path, method = request.url.path, request.scope.get("method", "GET")  # a WebSocket opens with GET
        headers, hint = dict(error.headers or {}), ""
        if error.status_code == HTTPStatus.NOT_FOUND:
            hint = "; /docs lists the paths"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            methods = _methods_of(request.scope, app.routes)
            headers["Allow"] = complete_methods(methods)
            if method == "OPTIONS":
                return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)
            hint = f", expected {' or '.join(methods)}"
        response = _respond(path, error.status_code, error.detail, f"{method} {path}: {error.detail}{hint}")
        response.headers.update(headers)
        return response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _: Exception) -> Response:  # the server logs the exception
        return internal_error(request.url.path)

    async def not_found(_: Scope, __: Receive, ___: Send) -> None:
        raise HTTPException(HTTPStatus.NOT_FOUND)  # by default a WebSocket gets status 403

    app.router.default = not_found


def complete_methods(declared: Iterable[str]) -> str:
    """Return the header `Allow` of a path with the `declared` methods: HEAD beside GET, and OPTIONS on every path."""
    listed = {*declared, "OPTIONS"}
    if "GET" in listed:
        listed.add("HEAD")
    return ", ".join(method for method in METHODS if method in listed)


def _methods_of(scope: Scope, routes: Iterable[BaseRoute]) -> list[str]:
    """Return the methods of all routes of a path; FastAPI reports those of the first one. A folder of files has GET."""
    routes = [route for route in routes if not isinstance(route, Mount)]
    declared = (
        method
        for method in ("GET", "POST")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    )
    return list(declared) or ["GET"]


def _respond(path: str, status: int, title: str, detail: str, error: errors.PreblockError | None = None) -> Response:
    """Return an error in the format of the protocol of `path`; without `error`, `title` names it."""
    media_type = "application/json"
    if path.startswith(OPEN_INFERENCE):
        document: dict[str, Any] = {"error": detail} | ({} if error is None else error.item_fields)
    elif path.startswith(OPENAI):
        document = error_body(detail, status) if error is None else error_document(error, status)
    elif path.startswith(TEI) or path in TEI_ROOT:
        document = tei.error_body(detail, status) if error is None else tei.error_document(error)
    else:
        media_type = MEDIA_TYPE
        document = {"type": "about:blank", "title": title, "status": status, "detail": detail}
        if error is not None:
            document = _problem_document(error)
        if (context := CURRENT_REQUEST.get()) is not None:
            document["request_id"] = context.text
    return Response(orjson.dumps(document), status, media_type=media_type)


def _problem_document(error: errors.PreblockError) -> dict[str, Any]:
    kind = type(error).__name__
    return {
        "type": f"urn:preblock:error:{kind}",
        "title": kind,
        "status": STATUS[type(error)],
        "detail": str(error),
        "field": error.field,
        "got": error.got,
        "expected": error.expected,
        **error.item_fields,
    }
