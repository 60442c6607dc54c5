"""Requests to an engine without a server."""

from preblock.service.core.results import EmbedResult
from preblock.service.core.types import TextRequest, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.runtime.model import TokenModel


async def ask_engine(engine: Engine, model: TokenModel, request: TokenRequest | TextRequest) -> EmbedResult:
    """Return the vectors of an admitted request."""
    with engine.admission.request("native") as record:
        return await engine.embed(model, request, record)
