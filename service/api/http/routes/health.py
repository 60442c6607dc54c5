"""Liveness, readiness and metrics."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from preblock.service.api.http.dispatcher import LIVE_PATHS, READY_PATHS
from preblock.service.api.http.errors import OPEN_INFERENCE
from preblock.service.api.http.negotiation import answer_type
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.schemas import native_api as schemas
from preblock.service.core.errors import NotAcceptable
from preblock.service.engine.engine import Engine

TEXT, OPENMETRICS = "text/plain", "application/openmetrics-text"
METRICS = {media: {"schema": {"type": "string"}} for media in (TEXT, OPENMETRICS)}


def router(engine: Engine) -> APIRouter:
    """Return the router for operators."""
    routes = APIRouter(tags=["operations"])

    async def live() -> None:
        """Answer 200 while the process runs."""

    async def ready() -> schemas.Readiness:
        """Answer 200 and the load: every model is open; 503 without one. Earlier, the server refuses connections."""
        engine.repository.check_ready()
        return schemas.Readiness(**engine.metrics.load())

    for path in LIVE_PATHS:
        if not path.startswith(OPEN_INFERENCE):  # its router has routes with bodies of their own
            routes.add_api_route(path, live, name=path[1:], status_code=200, response_class=Response)
    for path in READY_PATHS:
        if not path.startswith(OPEN_INFERENCE):
            routes.add_api_route(path, ready, name=path[1:], responses=schemas.NOT_READY)

    @routes.get("/metrics", response_class=Response, responses={200: {"content": METRICS}, **schemas.UNAVAILABLE})
    async def metrics(request: Request) -> Response:
        """Return the metrics in a Prometheus format."""
        content, media_type = engine.metrics.expose(_prefers_openmetrics(RawRequest.of(request).list_header(b"accept")))
        return Response(content, headers={"Content-Type": media_type})

    return routes


def _prefers_openmetrics(accept: str) -> bool:
    """Return True if an `Accept` header names OpenMetrics with at least the quality of plain text."""
    if OPENMETRICS not in accept.lower():  # a wildcard means plain text
        return False
    try:
        return answer_type(accept, (OPENMETRICS, TEXT)) == OPENMETRICS
    except NotAcceptable:  # such a scraper gets plain text
        return False
