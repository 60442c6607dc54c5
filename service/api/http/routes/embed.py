"""The native API: `POST /models/{name}/embed`."""

from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from typing import Any

import fastapi
import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response
from numpy.typing import NDArray

from preblock.service.api.http.answer import TYPES, respond, writable
from preblock.service.api.http.body import read_body, write_body
from preblock.service.api.http.negotiation import BYTES, JSON, NPY, SAFETENSORS, answer_type, body_type
from preblock.service.api.http.request import Handler, RawRequest, single_values
from preblock.service.api.http.response import ChunkedResponse
from preblock.service.api.http.schemas import native as schemas
from preblock.service.api.request_cache import RequestTemplate, json_template_of, template_of
from preblock.service.codecs.arrays import read_npy, read_raw
from preblock.service.codecs.native_json import (
    EmbedMessage,
    RequestOptions,
    read_beside,
    read_embed,
    read_json,
    read_query,
)
from preblock.service.codecs.native_json_response import floats_of
from preblock.service.codecs.prompt_embeds import PROMPT_EMBEDS, check_prompt_embeds
from preblock.service.codecs.safetensors import read_safetensors
from preblock.service.core.auth import caller
from preblock.service.core.errors import Invalid
from preblock.service.core.types import TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import fast_path_of, is_simple
from preblock.service.runtime.model import TokenModel

ARRAYS = (NPY, BYTES)
FILE_COST = 2**12
"""The file of a row takes as long as this many values, whatever its content."""


def handler(engine: Engine, max_body_bytes: int) -> Handler:
    """Return the handler of requests of this protocol."""

    async def embed(arrival: RawRequest, name: str, version: str | None = None) -> Response:
        with engine.admission.request("native") as record:
            model = engine.repository.get(name, version, caller=caller())
            record.model = model.name
            accept = arrival.accept
            answer_type(accept, TYPES)  # a request without a possible answer is refused before its body is read
            kind = body_type(arrival.header(b"content-type"), TYPES)
            body = await read_body(arrival, engine, max_body_bytes)
            message = await engine.scheduler.run(
                len(body), lambda: _read(body, kind, arrival.query, model.manifest.indices), text=kind == JSON
            )
            wanted, encoding = message.request, message.encoding
            media = answer_type(accept, *writable(wanted.dtype, encoding, wanted.outputs, message.tells_lengths))
            if encoding == PROMPT_EMBEDS:
                check_prompt_embeds(wanted, model.manifest)
            text = media == JSON and encoding == "float"
            wanted.in_pieces = True
            wanted.check = floats_of if text else None
            answer = await engine.embed(model, wanted, record)
            files = FILE_COST * len(answer.lengths) if encoding == PROMPT_EMBEDS else 0
            response = await engine.scheduler.run(answer.size + files, lambda: respond(answer, media, encoding), text)
            alike = kind in ARRAYS or (kind == JSON and engine.scheduler.is_inline(len(body), text=True))
            if (
                alike
                and isinstance(wanted, TokenRequest)
                and (media in ARRAYS or (media == JSON and encoding == "base64"))
            ):
                response.template = partial(_template, engine, model, wanted, body, kind)
            return await write_body(response, arrival, engine, text)

    return embed


def router(embed: Handler) -> APIRouter:
    """Return the routes of this protocol."""
    routes = APIRouter(tags=["embed"])

    @routes.post("/models/{name}/embed", **schemas.EMBED)
    async def embed_newest(request: fastapi.Request, name: str) -> Response:
        """Return the vectors that enter block 0, from the model's highest version."""
        return await embed(RawRequest.of(request), name, None)

    @routes.post("/models/{name}/versions/{version}/embed", **schemas.EMBED)
    async def embed_version(request: fastapi.Request, name: str, version: str) -> Response:
        """Return the vectors that enter block 0, from one version of the model."""
        return await embed(RawRequest.of(request), name, version)

    return routes


def _template(
    engine: Engine, model: TokenModel, request: TokenRequest, body: bytes, kind: str, response: ChunkedResponse
) -> RequestTemplate | None:
    """Return the template of a request; its body ends with its ids, or is JSON."""
    fast_path, ids = fast_path_of(engine, model, request.outputs, request.dtype), request.input_ids.values
    if fast_path is None or not is_simple(request):
        return None
    if kind == JSON:
        return json_template_of("native", fast_path, request, response, body)
    start = len(body) - ids.nbytes
    # The ids are a view of these very bytes: type and byte order are those of the reader.
    if ids.ctypes.data != np.frombuffer(body, np.uint8).ctypes.data + start:
        return None
    return template_of("native", fast_path, request, response, body[:start], start)


def _read(body: bytes, kind: str, query: bytes, indices: Collection[str]) -> EmbedMessage:
    if kind in ARRAYS and (wishes := _beside(query, tuple(indices))):
        return wishes.of(_read_array(body, kind, single_values(query)))
    fields = read_query(single_values(query))
    content: Mapping[str, Any]
    if kind == JSON:
        content = read_json(body)
    elif kind == SAFETENSORS:
        content = read_safetensors(body)
    else:
        content = {"input_ids": _read_array(body, kind, fields)}
        fields.pop("shape", None)
    for name in fields:
        if name in content:
            raise Invalid(name, "one in the query and one in the body", "one of them")
    return read_embed({**fields, **content}, indices)


@lru_cache  # a client asks the same again and again
def _beside(query: bytes, indices: tuple[str, ...]) -> RequestOptions | None:
    return read_beside(single_values(query), indices)


def _read_array(body: bytes, kind: str, query: Mapping[str, Any]) -> NDArray[Any]:
    return read_npy(body) if kind == NPY else read_raw(body, query.get("shape"))
