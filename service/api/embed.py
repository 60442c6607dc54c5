"""The native door: `POST /models/{name}/embed`."""

from collections.abc import Collection

from fastapi import APIRouter, Request
from fastapi.responses import Response

from incipit.service.api import schemas
from incipit.service.api.answer import respond
from incipit.service.api.body import read_body
from incipit.service.api.media import BYTES, JSON, NPY, answer_type, body_type
from incipit.service.api.query import single_values
from incipit.service.engine import Engine
from incipit.service.errors import Invalid, NotAcceptable
from incipit.service.wire.native import Embed, read_embed, read_json, read_npy, read_query


def router(engine: Engine, max_body_bytes: int) -> APIRouter:
    """Return the routes of this door."""
    routes = APIRouter(tags=["embed"])

    async def embed(request: Request, name: str, version: str | None = None) -> Response:
        with engine.metrics.request("native") as observation:
            model = engine.repository.get(name, version)
            observation.model = model.name
            media = answer_type(", ".join(request.headers.getlist("accept")), (JSON, BYTES, NPY))
            kind = body_type(request.headers.get("content-type"), (JSON, NPY))
            body = await read_body(request, max_body_bytes)
            query = single_values(request.query_params)
            message = await engine.scheduler.run(
                len(body), lambda: _read(body, kind, query, model.manifest.indices), text=kind == JSON
            )
            if media != JSON and message.only_json:
                raise NotAcceptable("Accept", media, f"{JSON} with text or truncate, to say how long the rows are")
            answer = await engine.embed(model, message.request)
            return await engine.scheduler.run(
                answer.size,
                lambda: respond(answer, media, message.encoding),
                text=media == JSON and message.encoding == "float",
            )

    @routes.post("/models/{name}/embed", **schemas.EMBED)
    async def embed_newest(request: Request, name: str) -> Response:
        """Return the vectors that enter block 0, from the model's highest version."""
        return await embed(request, name)

    @routes.post("/models/{name}/versions/{version}/embed", **schemas.EMBED)
    async def embed_version(request: Request, name: str, version: str) -> Response:
        """Return the vectors that enter block 0, from one version of the model."""
        return await embed(request, name, version)

    return routes


def _read(body: bytes, kind: str, query: dict[str, str], indices: Collection[str]) -> Embed:
    fields = read_query(query)
    if kind == NPY:
        return read_embed(fields, read_npy(body), indices)
    document = read_json(body)
    for name in fields:
        if name in document:
            raise Invalid(name, "one in the query and one in the body", "one of them")
    return read_embed({**fields, **document}, indices=indices)
