"""Errors as HTTP answers: the one place where kinds of error meet status codes."""

from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

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
    errors.TooLarge: 413,
    errors.RateLimited: 429,
    errors.UnsupportedFormat: 415,
    errors.NotAcceptable: 406,
    errors.Unavailable: 503,
    errors.ArtifactError: 500,
    errors.ProviderError: 500,
}
MEDIA_TYPE = "application/problem+json"
OPEN_INFERENCE = "/v2"
"""Paths below answer errors in the form of the Open Inference Protocol: `{"error": "…"}`."""
OPENAI = "/v1"
"""Paths below answer errors in the form of OpenAI's API: `{"error": {"message": "…", …}}`."""


def problem(error: errors.PreblockError) -> bytes:
    """Return the error as a problem document (RFC 9457), with the field, the value got and the value allowed.

    In a stream it also holds `retry_after`, because a step has no headers.
    """
    document = _document(error)
    if error.retry_after is not None:
        document["retry_after"] = error.retry_after
    return orjson.dumps(document)


def _document(error: errors.PreblockError) -> dict[str, Any]:
    kind = type(error).__name__
    return {
        "type": f"urn:preblock:error:{kind}",
        "title": kind,
        "status": STATUS[type(error)],
        "detail": str(error),
        "field": error.field,
        "got": error.got,
        "allowed": error.allowed,
    }


def respond(error: errors.PreblockError, path: str) -> Response:
    """Return the error in the form of the protocol of `path`."""
    if path.startswith(OPEN_INFERENCE):
        response = _json({"error": str(error)}, STATUS[type(error)])
    elif path.startswith(OPENAI):
        response = _json(error_document(error, STATUS[type(error)]), STATUS[type(error)])
    else:
        response = _problem(_document(error), STATUS[type(error)])
    if isinstance(error, errors.Unauthenticated):
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def install(app: FastAPI) -> None:
    """Make `app` answer every error in its protocol's form."""

    @app.exception_handler(errors.PreblockError)
    async def preblock_error(request: Request, error: errors.PreblockError) -> Response:
        return respond(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        detail = f"{request.method} {request.url.path}: {error.detail}"
        if request.url.path.startswith(OPEN_INFERENCE):
            response = _json({"error": detail}, error.status_code)
        elif request.url.path.startswith(OPENAI):
            response = _json(error_body(detail, error.status_code), error.status_code)
        else:
            document = {
                "type": "about:blank",
                "title": error.detail,
                "status": error.status_code,
                "detail": detail,
            }
            response = _problem(document, error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:  # noqa: ARG001 - it is logged above us
        return unforeseen(request.url.path)


def unforeseen(path: str) -> Response:
    """Return the answer to an unforeseen error, in the form of the protocol of `path`."""
    if path.startswith(OPEN_INFERENCE):
        return _json({"error": errors.INTERNAL_ERROR_MESSAGE}, 500)
    if path.startswith(OPENAI):
        return _json(error_body(errors.INTERNAL_ERROR_MESSAGE, 500), 500)
    document = {
        "type": "about:blank",
        "title": "Internal Server Error",
        "status": 500,
        "detail": errors.INTERNAL_ERROR_MESSAGE,
    }
    return _problem(document, 500)


def _problem(document: dict[str, Any], status: int) -> Response:
    """Return a problem document with the id of its request."""
    if (visit := CURRENT_REQUEST.get()) is not None:
        document["request_id"] = visit.text
    return Response(orjson.dumps(document), status, media_type=MEDIA_TYPE)


def _json(document: dict[str, Any], status: int) -> Response:
    return Response(orjson.dumps(document), status, media_type="application/json")
