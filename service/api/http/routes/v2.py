"""The Open Inference Protocol, version 2, over HTTP."""

from functools import partial
from typing import Any

import fastapi
from fastapi import APIRouter, Request
from fastapi.responses import Response

from preblock.service.api.http.negotiation import BYTES, JSON, body_type
from preblock.service.api.http.request import Handler, RawRequest, read_body
from preblock.service.api.http.response import ChunkedResponse, KnownHttpRequest, write_body
from preblock.service.api.http.routes.model_routes import add_model_routes
from preblock.service.api.http.schemas import v2 as schemas
from preblock.service.api.http.schemas.common import OpenAPI
from preblock.service.api.prepared import Layout, prepare_ids
from preblock.service.api.shared_memory import list_extensions, register_device, register_file, write_shared
from preblock.service.codecs.fields import drop_nulls, refuse_unknown
from preblock.service.codecs.native_json import TEXT_COPIES, read_json
from preblock.service.codecs.token_rows import read_integer
from preblock.service.codecs.v2 import metadata
from preblock.service.codecs.v2.parameters import REGION, read_cost, read_handle, region_document
from preblock.service.codecs.v2.requests import HEADER_LENGTH, find_tensor_offsets, read_infer
from preblock.service.codecs.v2.responses import check_finite, write_infer
from preblock.service.core.auth import caller
from preblock.service.core.errors import Invalid
from preblock.service.core.types import AnyRequest, EmbedOptions, TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import SequenceStore
from preblock.service.runtime.cuda_memory import DeviceMemory
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.session import INLINE_MAX_VALUES
from preblock.service.runtime.shared_memory import Memory, SharedFile

HEADER = HEADER_LENGTH.lower().encode()
PARTS_NAME = f'"{metadata.PARTS}"'.encode()
MAX_OPTIONS_BYTES = 2**16
"""Maximum size of a body with options; it is parsed in the event loop."""
MAX_REGION_BYTES = 2**12
REGION_FIELDS = ("key", "offset", "byte_size")
CUDA_REGION_FIELDS = ("raw_handle", "device_id", "byte_size")
SYSTEM, CUDA = "/systemsharedmemory", "/cudasharedmemory"


def handler(engine: Engine, sequences: SequenceStore) -> Handler:
    """Return the handler of inference requests; `sequences` stores their sequences."""

    async def infer(request: RawRequest, name: str, version: str | None) -> Response:
        """Return the requested outputs; the default is all outputs of tokens. Every request needs ids or a text."""
        with engine.admission.request("open-inference") as record:
            record.model = engine.repository.find(name, version, caller=caller()).name
            body_type(request.header(b"content-type"), (JSON, BYTES))
            body = await read_body(request, engine, record)
            model = engine.repository.find(name, version, caller=caller())  # perhaps another one than before the body
            header_length = request.header(HEADER)
            most = None  # an image or a spectrogram has more values than tokens
            if isinstance(model, TokenModel):
                most = engine.limits.max_parsed_values(len(model.manifest.indices))
            read = partial(read_infer, body, header_length, model.manifest, most, engine.shared_memory.read)
            shares_memory = engine.settings.current.max_shared_memory_bytes is not None
            cost = read_cost(len(body), shares_memory and REGION.encode() in body)
            # The input parts holds JSON in a binary body too.
            as_json = header_length is None or body.find(PARTS_NAME, 0, INLINE_MAX_VALUES) >= 0
            message = await engine.scheduler.run(cost, read, text=as_json)
            inputs = message.request
            options = message.options
            ranges = engine.shared_memory.open_outputs(options.regions) if options.regions else {}
            if isinstance(inputs, EmbedOptions):
                texts = [output for output in options.outputs if not options.binary[output]]
                # A mixed response is buffered, because its header states the length of the JSON part.
                mixed = texts and any(options.binary[name] for name in options.binary if name not in options.regions)
                if options.sequence is None and not mixed:
                    inputs.chunks = "sent"
                    inputs.check = partial(check_finite, ", ".join(texts)) if texts else None
                if mixed:
                    record.copies = TEXT_COPIES
            async with sequences.answer(model, inputs, record) as answer:
                if ranges:
                    await write_shared(answer, message, ranges)
                as_text = not all(options.binary.values())
                write = partial(write_infer, answer, message)
                parts, json_length = await engine.scheduler.run(answer.size, write, as_text)
                headers = [] if json_length is None else [(HEADER, b"%d" % json_length)]
                response = ChunkedResponse(parts, BYTES if headers else JSON, headers)
                if headers and header_length and not options.row_outputs and isinstance(model, TokenModel):
                    response.prepare = partial(_prepare, engine, model, inputs, body, header_length, (name, version))
                return await write_body(response, request, engine, as_text)

    return infer


def _prepare(
    engine: Engine,
    model: TokenModel,
    request: AnyRequest,
    body: bytes,
    header_length: str,
    address: tuple[str, str | None],
    response: ChunkedResponse,
) -> KnownHttpRequest | None:
    """Prepare requests with binary tensors like this one; None if the fast path cannot run them."""
    at = find_tensor_offsets(body, header_length, model.manifest)
    if at is None or not at.keys() <= {"input_ids", "offset"} or not isinstance(request, TokenRequest):
        return None
    layout = Layout(body[: min(at.values())], at["input_ids"], at.get("offset"))
    prepared = prepare_ids(engine, model, "open-inference", request, layout, response.parts)
    return KnownHttpRequest.of(prepared, address, response)


def router(engine: Engine, infer: Handler, version: str) -> APIRouter:
    """Return the router of this API; `version` is the version of the server."""
    routes = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    _add_server_routes(routes, engine, version)

    async def statistics(_: RawRequest, name: str | None, version: str | None) -> dict[str, Any]:
        """Return the statistics of one version of a model, or of all versions, in Triton's format."""
        models = engine.repository.select(name, version, caller=caller())
        return metadata.statistics_of(models, name, engine.metrics.statistics())

    async def model_metadata(_: RawRequest, name: str, version: str | None) -> dict[str, Any]:
        """Return the inputs and outputs of a model."""
        model = engine.repository.find(name, version, caller=caller())
        versions = engine.repository.versions(name) if version is None else [model.version]
        return metadata.model_metadata(name, versions, model.manifest)

    async def model_ready(_: RawRequest, name: str, version: str | None) -> dict[str, Any]:
        """Answer 200 for a served model."""
        engine.repository.find(name, version, caller=caller())
        return {"name": name, "ready": True}

    async def config(_: RawRequest, name: str, version: str | None) -> dict[str, Any]:
        """Return the configuration of a model in Triton's format."""
        model = engine.repository.find(name, version, caller=caller())
        return metadata.model_config(name, model.manifest, model.provider)

    # Before `/models/{name}`, because `stats` would match as a name.
    @routes.get(
        "/models/stats",
        response_model=schemas.ModelStatisticsList,
        responses=schemas.open_inference_errors(401, 503),
    )
    async def statistics_of_all(request: fastapi.Request) -> dict[str, Any]:
        """Return the statistics of every version of every model, in Triton's format."""
        return await statistics(RawRequest.of(request), None, None)

    refusals = schemas.open_inference_errors(401, 403, 404, 503)
    add_model_routes(routes, "GET", "", model_metadata, schemas.ModelMetadata, responses=refusals)
    add_model_routes(routes, "GET", "/ready", model_ready, schemas.ModelReady, responses=refusals)
    add_model_routes(routes, "GET", "/config", config, dict[str, Any], responses=refusals)
    add_model_routes(routes, "GET", "/stats", statistics, schemas.ModelStatisticsList, responses=refusals)
    add_model_routes(routes, "POST", "/infer", infer, **schemas.INFER)
    _add_repository_routes(routes, engine)
    _add_shared_memory_routes(routes, engine)
    return routes


def _add_server_routes(routes: APIRouter, engine: Engine, version: str) -> None:
    """Add the routes about the server and its models, and the probes of its health."""

    @routes.get("", response_model=schemas.ServerMetadata)
    async def metadata_of_server() -> dict[str, Any]:
        """Return the name, version and extensions of the server."""
        return metadata.server_metadata(version, await list_extensions(engine))

    @routes.get("/health/live", response_model=schemas.Live)
    async def server_live() -> dict[str, bool]:
        """Answer 200 while the process runs."""
        return {"live": True}

    @routes.get("/health/ready", response_model=schemas.Ready, responses=schemas.open_inference_errors(503))
    async def server_ready() -> dict[str, bool]:
        """Answer 200: every model is open; 503 without a model. Before that the server refuses connections."""
        engine.repository.check_ready()
        return {"ready": True}

    @routes.get("/models", response_model=schemas.ModelList, responses=schemas.open_inference_errors(401))
    async def models() -> dict[str, list[str]]:
        """Return the name of every model, as KServe does."""
        return {"models": [*engine.repository.newest(caller())]}


def _add_repository_routes(routes: APIRouter, engine: Engine) -> None:
    """Add the extension to list, load and unload the models of the repository."""

    async def read_option(request: fastapi.Request, name: str, default: Any, allowed: str) -> Any:
        """Return the only allowed field of the JSON body; its type must match the default."""
        body = await read_body(RawRequest.of(request), engine, None, MAX_OPTIONS_BYTES)
        options = read_json(body) if body else {}
        refuse_unknown(options, (name,))
        value = options.get(name, default)
        if not isinstance(value, type(default)):
            raise Invalid(name, value, allowed)
        return value

    @routes.post("/repository/index", name="repository_index", **schemas.INDEX)
    async def index(request: fastapi.Request) -> list[dict[str, str]]:
        """Return every version of every model; with `ready`, only the ready ones."""
        only_ready = await read_option(request, "ready", False, "true or false")
        return metadata.repository_index(engine.repository.index(caller()), only_ready)

    @routes.post("/repository/models/{name}/load", **schemas.MODEL_CONTROL)
    async def load(request: fastapi.Request, name: str) -> None:
        """Load the new versions of a model, even after an unload. Requires the setting `model_control`."""
        metadata.check_change("load", drop_nulls(await read_option(request, "parameters", {}, "an object")))
        await engine.control.load(name, caller())

    @routes.post("/repository/models/{name}/unload", **schemas.MODEL_CONTROL)
    async def unload(request: fastapi.Request, name: str) -> None:
        """Unload every version of a model after its last request. Requires the setting `model_control`."""
        metadata.check_change("unload", drop_nulls(await read_option(request, "parameters", {}, "an object")))
        await engine.control.unload(name, caller())


def _add_shared_memory_routes(routes: APIRouter, engine: Engine) -> None:
    """Add Triton's extensions of system and CUDA shared memory: register, list and unregister regions."""

    async def read_fields(request: Request, fields: tuple[str, ...]) -> dict[str, Any]:
        document = read_json(await read_body(RawRequest.of(request), engine, None, MAX_REGION_BYTES))
        refuse_unknown(document, fields)
        return document

    @routes.post(f"{SYSTEM}/region/{{region}}/register", name="register_shared_memory", **schemas.REGISTER)
    async def register(request: Request, region: str) -> None:
        """Register a region of POSIX shared memory. Requires the setting `max_shared_memory_bytes`."""
        document = await read_fields(request, REGION_FIELDS)
        key = document.get("key")
        if not isinstance(key, str):
            raise Invalid("key", "nothing" if key is None else key, "the name of POSIX shared memory")
        offset, size = (read_integer(field, document.get(field, 0)) for field in REGION_FIELDS[1:])
        register_file(engine, region, key, offset, size)

    @routes.post(f"{CUDA}/region/{{region}}/register", name="register_cuda_shared_memory", **schemas.REGISTER_CUDA)
    async def register_cuda(request: Request, region: str) -> None:
        """Register a region in memory of a GPU. Requires the setting `max_shared_memory_bytes`."""
        document = await read_fields(request, CUDA_REGION_FIELDS)
        device_id, size = (read_integer(field, document.get(field, 0)) for field in CUDA_REGION_FIELDS[1:])
        await register_device(engine, region, read_handle(document.get("raw_handle")), device_id, size)

    _add_region_routes(routes, engine, SYSTEM, SharedFile, "shared_memory", schemas.STATUS)
    _add_region_routes(routes, engine, CUDA, DeviceMemory, "cuda_memory", schemas.STATUS_CUDA)


def _add_region_routes(
    routes: APIRouter, engine: Engine, path: str, kind: type[Memory], name: str, answer: OpenAPI
) -> None:
    """Add the routes that list and unregister the regions in memory of a kind; `name` is part of their names."""
    shared = engine.shared_memory

    @routes.get(f"{path}/status", name=f"{name}_status", **answer)
    async def status_of_all() -> list[dict[str, Any]]:
        """Return every region of the caller."""
        return [region_document(region) for region in shared.status(kind)]

    @routes.get(f"{path}/region/{{region}}/status", name=f"{name}_region_status", **answer)
    async def status(region: str) -> list[dict[str, Any]]:
        """Return one region of the caller."""
        return [region_document(found) for found in shared.status(kind, region)]

    @routes.post(f"{path}/unregister", name=f"unregister_{name}", **schemas.UNREGISTER)
    async def unregister_all() -> None:
        """Unregister every region of the caller."""
        shared.unregister(kind)

    @routes.post(f"{path}/region/{{region}}/unregister", name=f"unregister_{name}_region", **schemas.UNREGISTER)
    async def unregister(region: str) -> None:
        """Unregister one region of the caller. An unknown name changes nothing, as in Triton."""
        shared.unregister(kind, region)
