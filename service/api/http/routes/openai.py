"""The OpenAI API: `/v1/embeddings` and `/v1/models`."""

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from preblock.service.api.http.negotiation import JSON, body_type
from preblock.service.api.http.request import Handler, RawRequest, read_body
from preblock.service.api.http.response import ChunkedResponse, KnownHttpRequest, choose_encoding, write_body
from preblock.service.api.http.schemas import openai as schemas
from preblock.service.api.prepared import prepare_texts
from preblock.service.codecs import openai
from preblock.service.codecs.native_json import EmbedMessage, read_json
from preblock.service.core.auth import caller
from preblock.service.core.types import TextRequest
from preblock.service.engine.engine import Engine
from preblock.service.runtime.model import TokenModel


def handler(engine: Engine) -> Handler:
    """Return the handler of `/v1/embeddings`. The body names the model, so it ignores the one of the path."""

    async def embeddings(request: RawRequest, _name: str, _version: str | None) -> Response:
        """Return one vector for each input: the sentence embedding of a static model, or the result of `pooling`.

        Other models have no sentence embeddings, so a request without `pooling` is an error.
        """
        with engine.admission.request("openai") as record:
            body_type(request.header(b"content-type"), (JSON,))
            body = await read_body(request, engine, record)

            def read() -> tuple[TokenModel, EmbedMessage, list[str]]:
                document = read_json(body, engine.limits.max_parsed_values())
                model = engine.repository.get(*openai.read_model(document), caller=caller())
                record.model = model.name
                message = openai.read_embeddings(document, model.name, model.manifest)
                return model, message, openai.list_ignored(document)

            model, message, ignored = await engine.scheduler.run(len(body), read, text=True)
            inputs = message.request
            answer = await engine.embed(model, inputs, record)
            text = message.encoding == "float"
            content = await engine.scheduler.run(answer.size, lambda: openai.write_embeddings(answer, message), text)
            headers = [(b"preblock-ignored", ", ".join(ignored).encode())] if ignored else []
            response, accept = ChunkedResponse(content, JSON, headers), request.list_header(b"accept-encoding")
            inline = engine.scheduler.is_inline(len(body), text=True)
            if inline and isinstance(inputs, TextRequest) and not (accept and choose_encoding(accept, text)):
                response.prepare = partial(_prepare, engine, model, inputs, message.encoding, body)
            return await write_body(response, request, engine, text)

    return embeddings


def _prepare(
    engine: Engine, model: TokenModel, request: TextRequest, encoding: str, body: bytes, response: ChunkedResponse
) -> KnownHttpRequest | None:
    """Prepare requests with other texts; None if the fast path cannot run them, or another field may hold `input`."""
    document = read_json(body)
    if any(isinstance(value, dict | list) for name, value in document.items() if name != "input"):
        return None
    write = partial(openai.write_vectors, model.name, model.version, encoding)
    prepared = prepare_texts(engine, model, request, body, encoding == "float", write)
    return KnownHttpRequest.of(prepared, openai.read_model(document), response)


def router(engine: Engine, embed: Handler) -> APIRouter:
    """Return the router of this API."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])

    @routes.post("/embeddings", description=embed.__doc__, **schemas.EMBEDDINGS)
    async def embeddings(request: Request) -> Response:
        return await embed(RawRequest.of(request), "", None)

    @routes.get("/models", name="list_openai_models")
    async def list_models() -> schemas.OpenAIModels:
        """Return every model."""
        models = engine.repository.newest(caller())
        data = [
            schemas.OpenAIModel(id=name, created=model.created)
            for name, model in models.items()
            if isinstance(model, TokenModel)
        ]
        return schemas.OpenAIModels(data=data)

    @routes.get("/models/{model:path}", name="get_openai_model", responses=schemas.MODEL_ERRORS)
    async def get_model(model: str) -> schemas.OpenAIModel:
        """Return a model, by `name` or `name:version`."""
        created = engine.repository.get(*openai.split_identifier(model), caller=caller()).created
        return schemas.OpenAIModel(id=model, created=created)

    return routes
