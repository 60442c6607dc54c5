"""`GET /`: the addresses of the service."""

from fastapi import APIRouter

from preblock.service.api.http.schemas.index import HealthPaths, ProtocolPaths, ServiceIndex


def router(version: str, grpc_port: int | None) -> APIRouter:
    """Return the router of the index.

    Args:
        version: of the service.
        grpc_port: port of gRPC; None if gRPC is off.

    """
    routes = APIRouter(tags=["operations"])
    content = ServiceIndex(version=version, protocols=ProtocolPaths(grpc_port=grpc_port), health=HealthPaths())

    @routes.get("/")
    async def list_paths() -> ServiceIndex:
        """Return the paths of documents, models, protocols, health and metrics."""
        return content

    return routes
