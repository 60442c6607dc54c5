"""The native API for pairwise biases: `POST /models/{name}/bias`."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from preblock.service.api.http.answer import TYPES, respond, writable
from preblock.service.api.http.body import read_body, write_body
from preblock.service.api.http.negotiation import JSON, answer_type, body_type
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.schemas import native as schemas
from preblock.service.codecs.native_json import read_bias, read_json
from preblock.service.core.auth import caller
from preblock.service.engine.engine import Engine


def router(engine: Engine, max_body_bytes: int) -> APIRouter:
    """Return the routes of this protocol."""
    routes = APIRouter(tags=["bias"])

    async def bias(request: Request, name: str, version: str | None = None) -> Response:
        with engine.admission.request("bias") as record:
            model = engine.repository.get(name, version, caller=caller())
            record.model = model.name
            accept = ", ".join(request.headers.getlist("accept"))
            answer_type(accept, TYPES)  # a request without a possible answer is refused before its body is read
            body_type(request.headers.get("content-type"), (JSON,))
            body = await read_body(RawRequest.of(request), engine, max_body_bytes)
            fields = await engine.scheduler.run(len(body), lambda: read_json(body), text=True)
            message, encoding = read_bias(fields)
            media = answer_type(accept, *writable(message.dtype))
            answer = await engine.bias(model, message, record)
            text = media == JSON and encoding == "float"
            response = await engine.scheduler.run(answer.size, lambda: respond(answer, media, encoding), text)
            return await write_body(response, RawRequest.of(request), engine, text)

    @routes.post("/models/{name}/bias", **schemas.BIAS)
    async def bias_newest(request: Request, name: str) -> Response:
        """Return the attention bias for the distance between a query and a key, from the highest version."""
        return await bias(request, name)

    @routes.post("/models/{name}/versions/{version}/bias", **schemas.BIAS)
    async def bias_version(request: Request, name: str, version: str) -> Response:
        """Return the attention bias for the distance between a query and a key, from one version of the model."""
        return await bias(request, name, version)

    return routes
