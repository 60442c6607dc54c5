"""The native API: `POST /models/{name}/embed`."""

from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response
from numpy.typing import NDArray

from preblock.service.api.http.answer import TYPES, respond, writable_types
from preblock.service.api.http.negotiation import BYTES, JSON, NPY, SAFETENSORS, answer_type, body_type
from preblock.service.api.http.request import Handler, RawRequest, merge_fields, read_body, single_values
from preblock.service.api.http.response import ChunkedResponse, KnownHttpRequest, write_body
from preblock.service.api.http.routes.model_routes import add_model_routes
from preblock.service.api.http.schemas import native_api as schemas
from preblock.service.api.prepared import Layout, find_json_ids, prepare_ids
from preblock.service.codecs import native_json
from preblock.service.codecs.arrays import read_npy, read_raw
from preblock.service.codecs.native_json import check_finite
from preblock.service.codecs.prompt_embeds import PROMPT_EMBEDS, check_prompt_embeds
from preblock.service.codecs.safetensors import read_safetensors
from preblock.service.core.auth import caller
from preblock.service.core.errors import Invalid
from preblock.service.core.types import Int64, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.runtime.model import TokenModel

ARRAYS = (NPY, BYTES)
FILE_COST = 2**12
"""Cost of writing a `prompt_embeds` file, in values: each row has a file of its own."""


def handler(engine: Engine) -> Handler:
    """Return the handler of this API."""

    async def embed(request: RawRequest, name: str, version: str | None) -> Response:
        """Return the vectors for block 0, or another output of the model."""
        with engine.admission.request("native") as record:
            record.model = engine.repository.get(name, version, caller=caller()).name
            accept = request.list_header(b"accept")
            answer_type(accept, TYPES)  # fail before the body is read
            kind = body_type(request.header(b"content-type"), TYPES)
            body = await read_body(request, engine, record)
            model = engine.repository.get(name, version, caller=caller())  # perhaps another one than before the body
            indices = model.manifest.indices
            read = partial(_read, body, kind, request.query, indices, engine.limits.max_parsed_values(len(indices)))
            message = await engine.scheduler.run(len(body), read, text=kind == JSON)
            inputs, encoding = message.request, message.encoding
            dtype = model.manifest.dtype_of(inputs.outputs[0], inputs.dtype)
            media = answer_type(accept, *writable_types(dtype, encoding, message.fields_reason))
            if encoding == PROMPT_EMBEDS:
                check_prompt_embeds(inputs, model.manifest)
            text = media == JSON and encoding == "float"
            inputs.chunks = "sent"
            inputs.check = check_finite if text else None
            answer = await engine.embed(model, inputs, record)
            files = FILE_COST * len(answer.lengths) if encoding == PROMPT_EMBEDS else 0
            response = await engine.scheduler.run(answer.size + files, lambda: respond(answer, media, encoding), text)
            known_body = kind in ARRAYS or (kind == JSON and engine.scheduler.is_inline(len(body), text=True))
            only_vectors = media in ARRAYS or (media == JSON and encoding == "base64")
            if known_body and only_vectors and isinstance(inputs, TokenRequest):
                response.prepare = partial(_prepare, engine, model, inputs, body, kind, (name, version))
            return await write_body(response, request, engine, text)

    return embed


def router(embed: Handler) -> APIRouter:
    """Return the router of this API."""
    routes = APIRouter(tags=["embed"])
    add_model_routes(routes, "POST", "/embed", embed, **schemas.EMBED)
    return routes


def _prepare(
    engine: Engine,
    model: TokenModel,
    request: TokenRequest,
    body: bytes,
    kind: str,
    address: tuple[str, str | None],
    response: ChunkedResponse,
) -> KnownHttpRequest | None:
    """Prepare requests like this one; None if the fast path cannot run them."""
    layout = find_json_ids(body) if kind == JSON else _find_array(body, request.input_ids.values)
    if layout is None:
        return None
    prepared = prepare_ids(engine, model, "native", request, layout, response.parts)
    return KnownHttpRequest.of(prepared, address, response)


def _find_array(body: bytes, ids: Int64) -> Layout | None:
    """Return the layout of a body of an array; None if it has another dtype or byte order than the ids."""
    start = len(body) - ids.nbytes
    # With the same dtype and byte order, the ids are a view of the last bytes.
    is_view = ids.ctypes.data == np.frombuffer(body, np.uint8).ctypes.data + start
    return Layout(body[:start], start) if is_view else None


def _read(body: bytes, kind: str, query: bytes, indices: Collection[str], max_values: int) -> native_json.EmbedMessage:
    options = _read_options(query, tuple(indices)) if kind in ARRAYS else None
    if options is not None:
        return options.of(_read_array(body, kind, single_values(query)))
    fields = native_json.read_query(single_values(query))
    content: Mapping[str, Any]
    if not body and "text" in fields:
        content = {}
    elif kind == JSON:
        content = native_json.read_json(body, max_values)
    elif kind == SAFETENSORS:
        content = read_safetensors(body)
    else:
        content = {"input_ids": _read_array(body, kind, fields)}
        fields.pop("shape", None)
    return native_json.read_embed(merge_fields(fields, content), indices)


@lru_cache  # clients repeat their URLs
def _read_options(query: bytes, indices: tuple[str, ...]) -> native_json.RequestOptions | None:
    return native_json.read_array_options(single_values(query), indices)


def _read_array(body: bytes, kind: str, query: Mapping[str, Any]) -> NDArray[Any]:
    shape = query.get("shape")
    if kind != NPY:
        return read_raw(body, shape)
    if shape is not None:
        raise Invalid("shape", shape, "nothing, because a .npy file states its shape")
    return read_npy(body)
