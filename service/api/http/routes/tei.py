"""`/embed` of text-embeddings-inference, for static embedding models.

`/tei/{model}` stands for the address of its server of one model.
"""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from preblock.service.api.http.body import read_body, write_body
from preblock.service.api.http.negotiation import JSON, body_type
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.response import ChunkedResponse
from preblock.service.api.http.schemas import tei as schemas
from preblock.service.codecs import tei
from preblock.service.codecs.native_json import read_json
from preblock.service.codecs.openai import split_identifier
from preblock.service.core.auth import caller
from preblock.service.core.types import TextRequest, TokenRequest
from preblock.service.engine.engine import Engine


def router(engine: Engine) -> APIRouter:
    """Return the router of this API."""
    routes = APIRouter(prefix="/tei", tags=["text-embeddings-inference"])

    @routes.post("/{static_model}/embed", name="tei_embed", **schemas.EMBED)
    @routes.post("/{static_model}", name="tei_embed_root", **schemas.EMBED)
    async def embed(request: Request, static_model: str) -> Response:
        """Return the sentence embedding of each input; `static_model` is `name` or `name:version`."""
        raw = RawRequest.of(request)
        with engine.admission.request("tei") as record:
            identifier = split_identifier(static_model)
            record.model = engine.repository.get(*identifier, caller=caller()).name
            body_type(raw.header(b"content-type"), (JSON,))
            body = await read_body(raw, engine, record)
            found = engine.repository.get(*identifier, caller=caller())  # perhaps another one than before the body

            def read() -> TextRequest | TokenRequest:
                document = read_json(body, engine.limits.max_parsed_values())
                return tei.read_embed(document, found.name, found.manifest)

            wanted = await engine.scheduler.run(len(body), read, text=True)
            answer = await engine.embed(found, wanted, record)
            content = await engine.scheduler.run(answer.size, lambda: tei.write_embed(answer), text=True)
            return await write_body(ChunkedResponse(content, JSON), raw, engine, True)

    return routes
