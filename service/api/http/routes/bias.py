"""The native API for pairwise biases: `POST /models/{name}/bias`."""

from functools import partial

from fastapi import APIRouter
from fastapi.responses import Response

from preblock.service.api.http.answer import TYPES, respond, writable_types
from preblock.service.api.http.negotiation import JSON, answer_type, body_type
from preblock.service.api.http.request import RawRequest, read_body
from preblock.service.api.http.response import write_body
from preblock.service.api.http.routes.model_routes import add_model_routes
from preblock.service.api.http.schemas import native_api as schemas
from preblock.service.codecs.native_json import read_bias, read_json
from preblock.service.core.auth import caller
from preblock.service.engine.engine import Engine


def router(engine: Engine) -> APIRouter:
    """Return the router of this API."""
    routes = APIRouter(tags=["bias"])

    async def bias(request: RawRequest, name: str, version: str | None) -> Response:
        """Return the attention bias by distance of query and key."""
        with engine.admission.request("bias") as record:
            record.model = engine.repository.get(name, version, caller=caller()).name
            accept = request.list_header(b"accept")
            answer_type(accept, TYPES)  # fail before the body is read
            body_type(request.header(b"content-type"), (JSON,))
            body = await read_body(request, engine, record)
            model = engine.repository.get(name, version, caller=caller())  # perhaps another one than before the body
            read = partial(read_json, body, engine.limits.max_parsed_values())
            fields = await engine.scheduler.run(len(body), read, text=True)
            message, encoding = read_bias(fields)
            media = answer_type(accept, *writable_types(message.dtype))
            answer = await engine.bias(model, message, record)
            text = media == JSON and encoding == "float"
            response = await engine.scheduler.run(answer.size, lambda: respond(answer, media, encoding), text)
            return await write_body(response, request, engine, text)

    add_model_routes(routes, "POST", "/bias", bias, **schemas.BIAS)
    return routes
