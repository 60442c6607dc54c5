"""`GET /models`: the served models and their parity reports."""

from fastapi import APIRouter

from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.routes.model_routes import add_model_routes
from preblock.service.api.http.schemas import native_api as schemas
from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.auth import caller
from preblock.service.engine.engine import Engine
from preblock.service.runtime.model import EncoderStem, TokenModel


def router(engine: Engine) -> APIRouter:
    """Return the router of model descriptions."""
    routes = APIRouter(tags=["models"])

    def describe(model: TokenModel | EncoderStem) -> schemas.ModelDescription:
        choice = engine.repository.choice._asdict() | {"active": model.provider}
        return schemas.ModelDescription(
            name=model.name,
            version=model.version,
            identity=model.identity,
            versions=engine.repository.versions(model.name),
            provider=model.provider,
            provider_choice=schemas.ProviderDescription(**choice),
            max_len=model.manifest.max_len if isinstance(model.manifest, Manifest) else None,
            max_tokens=engine.max_tokens,
            manifest=model.manifest,
            parity=model.parity,
        )

    @routes.get("/models")
    async def list_models() -> list[schemas.ModelDescription]:
        """Return every model, in its highest version."""
        return [describe(model) for model in engine.repository.newest(caller())]

    async def get_model(_: RawRequest, name: str, version: str | None) -> schemas.ModelDescription:
        """Return a model: manifest, limits, parity report, and the active provider."""
        return describe(engine.repository.find(name, version, caller=caller()))

    add_model_routes(routes, "GET", "", get_model, schemas.ModelDescription, responses=schemas.NOT_FOUND)
    return routes
