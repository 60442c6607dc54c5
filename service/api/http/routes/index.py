"""`GET /`: the addresses of the service; a browser is sent to the inspector."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from preblock.service.api.http.negotiation import read_qualities
from preblock.service.api.http.routes.pages import INSPECTOR
from preblock.service.api.http.schemas.native_api import HealthPaths, ProtocolPaths, ServiceIndex
from preblock.service.core.auth import Authenticator
from preblock.service.core.settings import Settings
from preblock.service.core.system import describe_machine


def router(version: str, settings: Settings, access: Authenticator) -> APIRouter:
    """Return the router of the index.

    Args:
        version: of the service.
        settings: of the service.
        access: authenticates callers of the index; a browser without a key is still sent to the inspector.

    """
    routes = APIRouter(tags=["operations"])
    content = ServiceIndex(
        version=version,
        workers=settings.workers,
        machine=describe_machine(),
        inspector=INSPECTOR if settings.has_inspector else None,
        protocols=ProtocolPaths(grpc_port=None if settings.grpc_uds else settings.grpc_port),
        health=HealthPaths(),
    )
    redirect: dict[int | str, dict[str, Any]] = {307: {"description": "To the inspector, for a browser."}}

    @routes.get("/", response_model=ServiceIndex, responses=redirect if settings.has_inspector else {})
    async def list_paths(request: Request) -> ServiceIndex | Response:
        """Return the paths of documents, models, protocols and health; also version, workers and machine."""
        if settings.has_inspector and _wants_page(request.headers.get("Accept", "")):
            return RedirectResponse(INSPECTOR, headers={"Vary": "Accept"})
        if access.needs_key:
            key = request.headers.get("Authorization")
            access.authenticate(None if key is None else key.encode("latin-1"))
        return content

    return routes


def _wants_page(accept: str) -> bool:
    """Return whether an `Accept` header names HTML, as those of browsers do."""
    try:
        return read_qualities(accept).get("text/html", 0) > 0
    except ValueError:  # no number; JSON needs no header
        return False
