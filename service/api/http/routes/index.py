"""`GET /`: the addresses of the service; a browser is sent to the inspector."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from preblock.service.api.http.negotiation import read_qualities
from preblock.service.api.http.routes.pages import INSPECTOR
from preblock.service.api.http.schemas.index import HealthPaths, ProtocolPaths, ServiceIndex


def router(version: str, grpc_port: int | None, inspector: bool) -> APIRouter:
    """Return the router of the index.

    Args:
        version: of the service.
        grpc_port: port of gRPC; None if gRPC is off.
        inspector: whether the service has the inspector.

    """
    routes = APIRouter(tags=["operations"])
    content = ServiceIndex(
        version=version,
        inspector=INSPECTOR if inspector else None,
        protocols=ProtocolPaths(grpc_port=grpc_port),
        health=HealthPaths(),
    )
    redirect: dict[int | str, dict[str, Any]] = {307: {"description": "To the inspector, for a browser."}}

    @routes.get("/", response_model=ServiceIndex, responses=redirect if inspector else {})
    async def list_paths(request: Request) -> ServiceIndex | Response:
        """Return the paths of documents, models, protocols, health and metrics."""
        if inspector and _wants_page(request.headers.get("Accept", "")):
            return RedirectResponse(INSPECTOR, headers={"Vary": "Accept"})
        return content

    return routes


def _wants_page(accept: str) -> bool:
    """Return whether an `Accept` header names HTML, as those of browsers do."""
    try:
        return read_qualities(accept).get("text/html", 0) > 0
    except ValueError:  # no number; JSON needs no header
        return False
