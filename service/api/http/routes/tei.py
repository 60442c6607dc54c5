"""text-embeddings-inference: its paths at the root for one model, and below `/tei/{static_model}` for each model.

At the root, the setting `tei` names the model, or it is the only one that can answer.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import Response

from preblock.service.api.http.negotiation import JSON, body_type
from preblock.service.api.http.request import RawRequest, read_body
from preblock.service.api.http.response import ChunkedResponse, write_body
from preblock.service.api.http.schemas import tei as schemas
from preblock.service.artifacts.manifest import Manifest
from preblock.service.codecs import tei
from preblock.service.codecs.chunks import Part
from preblock.service.codecs.native_json import read_json
from preblock.service.codecs.openai import split_identifier
from preblock.service.core.auth import caller
from preblock.service.core.errors import Invalid, NotFound, shorten
from preblock.service.core.types import EmbedResult, TextRequest, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.observability.context import RequestRecord
from preblock.service.runtime.model import TokenModel

MAX_LISTED_BYTES = 2**10
"""Most bytes of the header with the ignored fields; clients limit the size of headers."""
TOKEN_VALUES = 64
"""Memory of a token's object and its text, in values of float32."""
Endpoint = Callable[[RawRequest, str | None], Awaitable[Any]]
"""Answers a request for a model by `name` or `name:version`; None stands for the model of the root."""
Read = Callable[[Mapping[str, Any], str, Manifest], tei.Message]
Compute = Callable[[TokenModel, TextRequest | TokenRequest, RequestRecord], Awaitable[list[Part]]]


def router(engine: Engine, version: str) -> APIRouter:
    """Return the router of this API; `version` is the version of the server."""
    routes = APIRouter(tags=["text-embeddings-inference"])

    async def embed(request: RawRequest, name: str | None) -> Response:
        """Return the sentence embedding of each input."""
        compute = partial(_write_vectors, engine, tei.write_embed)
        return await _answer(engine, request, partial(_find, engine, name, "embed"), tei.read_embed, compute)

    async def embed_all(request: RawRequest, name: str | None) -> Response:
        """Return a vector for each token of each input."""
        compute = partial(_write_vectors, engine, tei.write_embed_all)
        return await _answer(engine, request, partial(_find, engine, name, "embed_all"), tei.read_embed_all, compute)

    async def tokenize(request: RawRequest, name: str | None) -> Response:
        """Return the tokens of each text, and their places in it."""
        compute = partial(_write_tokens, engine)
        return await _answer(engine, request, partial(_find, engine, name, "tokenize"), tei.read_tokenize, compute)

    async def info(_: RawRequest, name: str | None) -> schemas.Info:
        """Describe the model that answers `/embed`, or without one `/embed_all`; also the limits of the server."""
        return _describe(engine, _find(engine, name, "info"), version)

    for action in ("embed", ""):  # the address of the model itself stands for `/embed`
        _add(routes, "POST", action, embed, **schemas.EMBED)
    _add(routes, "POST", "embed_all", embed_all, **schemas.EMBED_ALL)
    _add(routes, "POST", "tokenize", tokenize, **schemas.TOKENIZE)
    _add(routes, "GET", "info", info, response_model=schemas.Info, responses=schemas.REFUSALS)
    return routes


def _add(routes: APIRouter, method: str, action: str, endpoint: Endpoint, **options: Any) -> None:
    """Add the paths of an action at the root, and below the name of a model."""
    options = {"methods": [method], "response_model": None, "description": endpoint.__doc__} | options

    async def of_the_root(request: Request) -> Any:
        return await endpoint(RawRequest.of(request), None)

    async def of_a_model(request: Request, static_model: str) -> Any:
        return await endpoint(RawRequest.of(request), static_model)

    named, end = f"tei_{action or 'root'}", f"/{action}" if action else ""
    routes.add_api_route(end or "/", of_the_root, name=named, **options)
    routes.add_api_route("/tei/{static_model}" + end, of_a_model, name=f"{named}_model", **options)


async def _answer(
    engine: Engine, request: RawRequest, find: Callable[[], TokenModel], read: Read, compute: Compute
) -> Response:
    """Read a request, compute its answer, and list its ignored fields in a header."""
    with engine.admission.request("tei") as record:
        record.model = find().name
        body_type(request.header(b"content-type"), (JSON,))
        body = await read_body(request, engine, record)
        model = find()  # perhaps another one than before the body

        def parse() -> tei.Message:
            return read(read_json(body, engine.limits.max_parsed_values()), model.name, model.manifest)

        wanted, ignored = await engine.scheduler.run(len(body), parse, text=True)
        content = await compute(model, wanted, record)
        headers = [(b"preblock-ignored", _write_names(ignored))] if ignored else []
        return await write_body(ChunkedResponse(content, JSON, headers), request, engine, True)


async def _write_vectors(
    engine: Engine,
    write: Callable[[EmbedResult], list[Part]],
    model: TokenModel,
    wanted: TextRequest | TokenRequest,
    record: RequestRecord,
) -> list[Part]:
    """Compute vectors, and write them."""
    answer = await engine.embed(model, wanted, record)
    return await engine.scheduler.run(answer.size, lambda: write(answer), text=True)


async def _write_tokens(
    engine: Engine, model: TokenModel, wanted: TextRequest | TokenRequest, record: RequestRecord
) -> list[Part]:
    """Tokenize texts, and write their tokens. The model does not run, so the record names no run."""
    assert isinstance(wanted, TextRequest)
    if (tokenizer := model.tokenizer) is None:
        raise Invalid("model", model.name, "a model with a tokenizer")
    found = await engine.to_tokens(model, wanted)
    ids = record.ids = found.input_ids
    size = TOKEN_VALUES * len(ids.values)
    await engine.admission.reserve_response(record, size)

    def write() -> list[Part]:
        return tei.write_tokens(wanted.text, found, tokenizer.spell(ids.values.tolist()))

    return await engine.scheduler.run(size, write, text=True)


def _write_names(names: list[str]) -> bytes:
    """Return names from a client as the value of a header: percent-encoded, so that they cannot end it."""
    return ", ".join(quote(shorten(name)) for name in names).encode()[:MAX_LISTED_BYTES]


def _find(engine: Engine, name: str | None, action: str) -> TokenModel:
    """Return the model of a request: the named one, or the only one of the caller's that can answer.

    Raises:
        ClientFault: the caller may not use the named model, or not exactly one model can answer.
        Unavailable: no model is served.

    """
    name = name or engine.settings.current.tei
    if name is not None:
        return engine.repository.get(*split_identifier(name), caller=caller())
    engine.repository.check_ready()
    served = {model.name: model for model in engine.repository.all(caller()) if isinstance(model, TokenModel)}
    static = [model for model in served.values() if model.manifest.sentence is not None]
    readers = [model for model in served.values() if model.tokenizer is not None]
    found = {"embed": static, "info": static or readers}.get(action, readers)
    if len(found) == 1:
        return found[0]
    if not found:
        kind = "static embedding model, such as wordllama" if action == "embed" else "model with a tokenizer"
        raise NotFound("model", "none", kind, message=f"no served model can answer /{action}: it needs a {kind}")
    names = ", ".join(model.name for model in found)
    message = f"/{action}: {names} can answer; start the server with --tei MODEL, or send to /tei/MODEL/{action}"
    raise Invalid("model", "none", names, message=message)


def _describe(engine: Engine, model: TokenModel, version: str) -> schemas.Info:
    limits, manifest = engine.settings.current, model.manifest
    return schemas.Info(
        model_id=model.name,
        model_sha=model.identity,
        model_type={"embedding": {"pooling": "none" if manifest.sentence is None else manifest.sentence.pooling}},
        max_concurrent_requests=limits.max_concurrent_requests,
        max_input_length=min(manifest.limit, limits.max_request_tokens),
        max_batch_tokens=limits.max_request_tokens,
        max_client_batch_size=limits.max_request_rows,
        tokenization_workers=limits.workers,
        version=version,
    )
