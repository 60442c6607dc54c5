"""`GET /models`: a list of the models. `GET /models/{name}`: all about one of them."""

from fastapi import APIRouter

from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.routes.model_routes import add_model_routes
from preblock.service.api.http.schemas import native_api as schemas
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import EMBEDDINGS
from preblock.service.artifacts.references import describe_check
from preblock.service.codecs.output_uses import describe_uses, use_of
from preblock.service.core.auth import caller
from preblock.service.engine.engine import Engine
from preblock.service.runtime.model import EncoderStem, TokenModel


def router(engine: Engine) -> APIRouter:
    """Return the router of model descriptions."""
    routes = APIRouter(tags=["models"])

    @routes.get("/models")
    async def list_models() -> list[schemas.ModelSummary]:
        """List the models: name, version, family, limits, and readiness."""
        served = engine.repository.newest(caller())
        highest = {state.name: state.version for state in engine.repository.index(caller())}
        return [
            _summarize(engine, name, served[name])
            if name in served
            else schemas.ModelSummary(name=name, version=version, ready=False)
            for name, version in highest.items()
        ]

    async def get_model(_: RawRequest, name: str, version: str | None) -> schemas.ModelDescription:
        """Describe a model: outputs, limits, manifest, parity report, provider."""
        return _describe(engine, name, engine.repository.find(name, version, caller=caller()))

    add_model_routes(routes, "GET", "", get_model, schemas.ModelDescription, responses=schemas.MODEL_ERRORS)
    return routes


def _describe(engine: Engine, name: str, model: TokenModel | EncoderStem) -> schemas.ModelDescription:
    """Return all about a model."""
    choice = engine.repository.choice.for_model(model.manifest)._asdict()
    tokens = model.manifest if isinstance(model.manifest, Manifest) else None
    widths, lookup_use = (tokens.widths, tokens.lookup_use) if tokens else ({EMBEDDINGS: model.manifest.width}, "")
    return schemas.ModelDescription(
        name=name,
        version=model.version,
        identity=model.identity,
        versions=engine.repository.versions(model.name),
        random_weights=model.manifest.source.has_random_weights,
        provider=model.provider,
        provider_choice=schemas.ProviderDescription(**choice),
        max_len=tokens and tokens.max_len,
        max_tokens=engine.max_tokens,
        first_row=tokens and tokens.first_row,
        outputs={
            name: schemas.ModelOutput(width=widths.get(name), use_as=use_of(name, lookup_use), description=text)
            for name, text in describe_uses(model.manifest).items()
        },
        references_checked=describe_check(model.manifest, model.parity),
        manifest=model.manifest,
        parity=model.parity,
    )


def _summarize(engine: Engine, name: str, model: TokenModel | EncoderStem) -> schemas.ModelSummary:
    """Return the line of a served model in the list."""
    tokens = model.manifest if isinstance(model.manifest, Manifest) else None
    return schemas.ModelSummary(
        name=name,
        version=model.version,
        ready=True,
        family=model.manifest.family,
        random_weights=model.manifest.source.has_random_weights,
        max_len=tokens and tokens.max_len,
        vocab_size=tokens and tokens.vocab_size,
        max_tokens=engine.max_tokens,
    )
