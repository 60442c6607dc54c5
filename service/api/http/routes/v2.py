"""The protocol of the Open Inference Protocol, version 2, over HTTP."""

from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import fastapi
from fastapi import APIRouter
from fastapi.responses import Response

from preblock.service.api.http.body import read_body, write_body
from preblock.service.api.http.negotiation import BYTES, JSON, body_type
from preblock.service.api.http.request import Handler, RawRequest
from preblock.service.api.http.response import ChunkedResponse
from preblock.service.api.http.schemas import v2 as schemas
from preblock.service.api.request_cache import RequestTemplate, template_of
from preblock.service.codecs.native_json import read_json
from preblock.service.codecs.token_rows import refuse_unknown
from preblock.service.codecs.v2.infer import HEADER_LENGTH, places, read_infer
from preblock.service.codecs.v2.infer_response import check_finite, write_infer
from preblock.service.codecs.v2.metadata import (
    check_change,
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)
from preblock.service.core.auth import caller
from preblock.service.core.errors import Invalid
from preblock.service.core.types import AnyRequest, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import fast_path_of, is_simple
from preblock.service.engine.sequences import SequenceStore
from preblock.service.runtime.model import EncoderStem, TokenModel

HEADER = HEADER_LENGTH.lower().encode()


def handler(engine: Engine, sequences: SequenceStore, max_body_bytes: int) -> Handler:
    """Return the handler of inference requests of this protocol; `sequences` holds their sequences."""

    async def infer(arrival: RawRequest, name: str, version: str | None = None) -> Response:
        with engine.admission.request("open-inference") as record:
            model = engine.repository.find(name, version, caller=caller())
            record.model = model.name
            body_type(arrival.header(b"content-type"), (JSON, BYTES))
            body = await read_body(arrival, engine, max_body_bytes)
            header_length = arrival.header(HEADER)
            text = header_length is None
            message = await engine.scheduler.run(
                len(body), lambda: read_infer(body, header_length, model.manifest), text
            )
            request = message.request
            if isinstance(request, TokenRequest):
                texts = [output for output, binary in message.binary.items() if not binary]
                # Where bytes follow, the length of the JSON is told before it.
                request.in_pieces = request.sequence is None and len(texts) in (0, len(message.binary))
                if texts and request.in_pieces:
                    request.check = partial(check_finite, ", ".join(texts))
            async with sequences.answer(model, request, record) as answer:
                as_text = not all(message.binary.values())
                parts, json_length = await engine.scheduler.run(
                    answer.size, lambda: write_infer(answer, message), as_text
                )
                if json_length is None:
                    reply = ChunkedResponse(parts, JSON)
                else:
                    reply = ChunkedResponse(parts, BYTES, [(HEADER, b"%d" % json_length)])
                    reply.template = partial(_template, engine, model, message.request, body, header_length)
                return await write_body(reply, arrival, engine, as_text)

    return infer


def _template(
    engine: Engine,
    model: TokenModel | EncoderStem,
    request: AnyRequest,
    body: bytes,
    header_length: str | None,
    reply: ChunkedResponse,
) -> RequestTemplate | None:
    """Return the template of a request with binary tensors in request and answer."""
    if header_length is None or not isinstance(model, TokenModel) or not isinstance(request, TokenRequest):
        return None
    fast_path = fast_path_of(engine, model, request.outputs, request.dtype)
    at = places(body, header_length, model.manifest)
    if fast_path is None or not is_simple(request) or at is None or not at.keys() <= {"input_ids", "offset"}:
        return None
    head = body[: min(at.values())]
    return template_of("open-inference", fast_path, request, reply, head, at["input_ids"], at.get("offset"))


def router(engine: Engine, infer: Handler, version: str, max_body_bytes: int) -> APIRouter:
    """Return the routes of this protocol; `version` is the server's."""
    routes = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @routes.get("", response_model=schemas.ServerMetadata)
    async def metadata_of_server() -> dict[str, Any]:
        """Return name, version and extensions of the server."""
        return server_metadata(version)

    @routes.get("/health/live", response_model=schemas.Live)
    async def server_live() -> dict[str, bool]:
        """Answer as long as the process does."""
        return {"live": True}

    @routes.get("/health/ready", response_model=schemas.Ready, responses=schemas.open_inference_errors(503))
    async def server_ready() -> dict[str, bool]:
        """Answer 200: every model is open. Before that the server refuses connections."""
        return {"ready": True}

    def statistics(name: str | None, version: str | None) -> dict[str, Any]:
        """Return the statistics of one version of a model, or of all versions, in Triton's form."""
        models, found = engine.repository.select(name, version, caller=caller()), engine.metrics.statistics()
        return {"model_stats": [model_statistics(m.name, m.version, found[m.name, m.version]) for m in models]}

    def metadata(name: str, version: str | None) -> dict[str, Any]:
        """Return inputs and outputs of a model."""
        model = engine.repository.find(name, version, caller=caller())
        versions = engine.repository.versions(name) if version is None else [model.version]
        return model_metadata(model.name, versions, model.manifest)

    def model_ready(name: str, version: str | None) -> dict[str, Any]:
        """Answer 200 for a served model."""
        return {"name": engine.repository.find(name, version, caller=caller()).name, "ready": True}

    def config(name: str, version: str | None) -> dict[str, Any]:
        """Return the configuration of a model, as Triton has it."""
        model = engine.repository.find(name, version, caller=caller())
        return model_config(model.name, model.manifest, model.provider)

    # Before the path of a model: it could be the name of one.
    @routes.get("/models/stats", response_model=schemas.ModelStatisticsList)
    async def statistics_of_all() -> dict[str, Any]:
        """Return the statistics of every version of every model, in Triton's form."""
        return statistics(None, None)

    def add(action: str, describe: Callable[[str, str | None], dict[str, Any]], answer: Any) -> None:
        """Add the routes of the highest version of a model, and of a named version."""

        async def of_newest(name: str) -> dict[str, Any]:
            return describe(name, None)

        async def of_version(name: str, version: str) -> dict[str, Any]:
            return describe(name, version)

        for path, endpoint in (("/models/{name}", of_newest), ("/models/{name}/versions/{version}", of_version)):
            routes.add_api_route(
                path + action,
                endpoint,
                name=f"{describe.__name__}_{endpoint.__name__}",
                description=describe.__doc__,
                response_model=answer,
                responses=schemas.open_inference_errors(401, 403, 404),
            )

    add("", metadata, schemas.ModelMetadata)
    add("/ready", model_ready, schemas.ModelReady)
    add("/config", config, dict[str, Any])
    add("/stats", statistics, schemas.ModelStatisticsList)

    @routes.post("/models/{name}/infer", **schemas.INFER)
    async def infer_newest(request: fastapi.Request, name: str) -> Response:
        """Return the outputs asked for, `embeddings` by default; inputs other than `input_ids` may be left out."""
        return await infer(RawRequest.of(request), name, None)

    @routes.post("/models/{name}/versions/{version}/infer", **schemas.INFER)
    async def infer_version(request: fastapi.Request, name: str, version: str) -> Response:
        """Return the outputs asked for of one version of the model."""
        return await infer(RawRequest.of(request), name, version)

    @routes.post("/repository/index", **schemas.INDEX)
    async def index(request: fastapi.Request) -> list[dict[str, str]]:
        """Return every version of every model; with `ready`, only the ready ones."""
        body = await read_body(RawRequest.of(request), engine, max_body_bytes)
        wishes = read_json(body) if body else {}
        refuse_unknown(wishes, ("ready",))
        only_ready = wishes.get("ready", False)
        if not isinstance(only_ready, bool):
            raise Invalid("ready", only_ready, "true or false")
        return repository_index((astuple(state) for state in engine.repository.index(caller())), only_ready)

    async def check(request: fastapi.Request, verb: str) -> None:
        body = await read_body(RawRequest.of(request), engine, max_body_bytes)
        wishes = read_json(body) if body else {}
        refuse_unknown(wishes, ("parameters",))
        parameters = wishes.get("parameters", {})
        if not isinstance(parameters, dict):
            raise Invalid("parameters", parameters, "an object")
        check_change(verb, parameters)

    @routes.post("/repository/models/{name}/load", **schemas.CHANGE)
    async def load(request: fastapi.Request, name: str) -> None:
        """Load the new versions of a model, also of an unloaded one, if `model_control` allows it."""
        await check(request, "load")
        await engine.control.load(name, caller())

    @routes.post("/repository/models/{name}/unload", **schemas.CHANGE)
    async def unload(request: fastapi.Request, name: str) -> None:
        """Let go of every version of a model, each after its last request, where `model_control` allows it."""
        await check(request, "unload")
        await engine.control.unload(name, caller())

    return routes
