"""`GET /`: the addresses of the service."""

from fastapi import APIRouter

from preblock.service.api.http.schemas.index import HealthPaths, ProtocolPaths, ServiceIndex
from preblock.service.core.settings import Settings
from preblock.service.core.system import describe_machine


def router(version: str, settings: Settings) -> APIRouter:
    """Return the router of the index.

    Args:
        version: of the service.
        settings: of the service.

    """
    routes = APIRouter(tags=["operations"])
    content = ServiceIndex(
        version=version,
        workers=settings.workers,
        machine=describe_machine(),
        protocols=ProtocolPaths(grpc_port=settings.grpc_port),
        health=HealthPaths(),
    )

    @routes.get("/")
    async def list_paths() -> ServiceIndex:
        """Return the paths of documents, models, protocols, health and metrics, the version, workers and machine."""
        return content

    return routes
