"""Triton's extensions of system and CUDA shared memory over HTTP: register, list and unregister regions."""

from typing import Any

from fastapi import APIRouter, Request

from preblock.service.api.http.request import RawRequest, read_body
from preblock.service.api.http.schemas import v2 as schemas
from preblock.service.api.http.schemas.common import OpenAPI
from preblock.service.api.shared_memory import register_device, register_file
from preblock.service.codecs.fields import refuse_unknown
from preblock.service.codecs.native_json import read_json
from preblock.service.codecs.token_rows import read_integer
from preblock.service.codecs.v2.parameters import read_handle, region_document
from preblock.service.core.errors import Invalid
from preblock.service.engine.engine import Engine
from preblock.service.runtime.cuda_memory import DeviceMemory
from preblock.service.runtime.shared_memory import Memory, SharedFile

MAX_BODY_BYTES = 2**12
FIELDS = ("key", "offset", "byte_size")
CUDA_FIELDS = ("raw_handle", "device_id", "byte_size")
SYSTEM, CUDA = "/systemsharedmemory", "/cudasharedmemory"


def router(engine: Engine) -> APIRouter:
    """Return the router of the extensions."""
    routes = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    async def read_fields(request: Request, fields: tuple[str, ...]) -> dict[str, Any]:
        document = read_json(await read_body(RawRequest.of(request), engine, None, MAX_BODY_BYTES))
        refuse_unknown(document, fields)
        return document

    @routes.post(f"{SYSTEM}/region/{{region}}/register", name="register_shared_memory", **schemas.REGISTER)
    async def register(request: Request, region: str) -> None:
        """Register a region of POSIX shared memory. Requires the setting `max_shared_memory_bytes`."""
        document = await read_fields(request, FIELDS)
        key = document.get("key")
        if not isinstance(key, str):
            raise Invalid("key", "nothing" if key is None else key, "the name of POSIX shared memory")
        offset, size = (read_integer(field, document.get(field, 0)) for field in FIELDS[1:])
        register_file(engine, region, key, offset, size)

    @routes.post(f"{CUDA}/region/{{region}}/register", name="register_cuda_shared_memory", **schemas.REGISTER_CUDA)
    async def register_cuda(request: Request, region: str) -> None:
        """Register a region in memory of a GPU. Requires the setting `max_shared_memory_bytes`."""
        document = await read_fields(request, CUDA_FIELDS)
        device_id, size = (read_integer(field, document.get(field, 0)) for field in CUDA_FIELDS[1:])
        await register_device(engine, region, read_handle(document.get("raw_handle")), device_id, size)

    _add_region_routes(routes, engine, SYSTEM, SharedFile, "shared_memory", schemas.STATUS)
    _add_region_routes(routes, engine, CUDA, DeviceMemory, "cuda_memory", schemas.STATUS_CUDA)
    return routes


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
