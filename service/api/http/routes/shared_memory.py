"""Triton's system shared memory extension over HTTP: register, list and unregister regions."""

from typing import Any

from fastapi import APIRouter, Request

from preblock.service.api.http.body import read_body
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.schemas import shared_memory as schemas
from preblock.service.codecs.fields import drop_nulls, refuse_unknown
from preblock.service.codecs.native_json import read_json
from preblock.service.codecs.token_rows import read_integer
from preblock.service.codecs.v2.shared_memory import region_document
from preblock.service.core.errors import Invalid
from preblock.service.engine.engine import Engine

MAX_BODY_BYTES = 2**12
FIELDS = ("key", "offset", "byte_size")


def router(engine: Engine) -> APIRouter:
    """Return the router of the extension."""
    routes = APIRouter(prefix="/v2/systemsharedmemory", tags=["Open Inference Protocol"])
    shared = engine.shared_memory

    @routes.post("/region/{region}/register", name="register_shared_memory", **schemas.REGISTER)
    async def register(request: Request, region: str) -> None:
        """Register a region of POSIX shared memory. Requires the setting `max_shared_memory_bytes`."""
        document = drop_nulls(read_json(await read_body(RawRequest.of(request), engine, MAX_BODY_BYTES, None)))
        refuse_unknown(document, FIELDS)
        key = document.get("key")
        if not isinstance(key, str):
            raise Invalid("key", "nothing" if key is None else key, "the name of POSIX shared memory")
        offset, size = (read_integer(field, document.get(field, 0)) for field in FIELDS[1:])
        shared.register(region, key, offset, size)

    @routes.get("/status", name="shared_memory_status", **schemas.STATUS)
    async def status_of_all() -> list[dict[str, Any]]:
        """Return every region of the caller."""
        return [region_document(region) for region in shared.status()]

    @routes.get("/region/{region}/status", name="shared_memory_region_status", **schemas.STATUS)
    async def status(region: str) -> list[dict[str, Any]]:
        """Return one region of the caller."""
        return [region_document(found) for found in shared.status(region)]

    @routes.post("/unregister", name="unregister_shared_memory", **schemas.UNREGISTER)
    async def unregister_all() -> None:
        """Unregister every region of the caller."""
        shared.unregister()

    @routes.post("/region/{region}/unregister", name="unregister_shared_memory_region", **schemas.UNREGISTER)
    async def unregister(region: str) -> None:
        """Unregister one region of the caller. An unknown name changes nothing, as in Triton."""
        shared.unregister(region)

    return routes
