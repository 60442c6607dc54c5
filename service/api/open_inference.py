"""The door of the Open Inference Protocol, version 2, over HTTP."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from incipit.service.api.body import read_body
from incipit.service.api.media import BYTES, JSON, body_type
from incipit.service.engine import Engine
from incipit.service.errors import Unavailable
from incipit.service.wire.open_inference import (
    EXTENSIONS,
    HEADER_LENGTH,
    model_metadata,
    read_infer,
    write_infer,
)

INFER_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {"schema": {"type": "object"}},
            BYTES: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def router(engine: Engine, version: str, max_body_bytes: int) -> APIRouter:
    """Return the routes of this door; `version` is the server's."""
    routes = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    async def infer(request: Request, name: str, model_version: str | None = None) -> Response:
        with engine.metrics.request("open-inference") as observation:
            model = engine.repository.find(name, model_version)
            observation.model = model.name
            body_type(request.headers.get("content-type"), (JSON, BYTES))
            body = await read_body(request, max_body_bytes)
            header_length = request.headers.get(HEADER_LENGTH)
            text = header_length is None
            message = await engine.scheduler.run(
                len(body), lambda: read_infer(body, header_length, model.manifest), text
            )
            answer = await engine.answer(model, message.request)

            def write() -> tuple[bytes, int | None]:
                parts, json_length = write_infer(answer, message)
                return b"".join(parts), json_length

            content, json_length = await engine.scheduler.run(answer.size, write, not all(message.binary.values()))
            if json_length is None:
                return Response(content, media_type=JSON)
            return Response(content, media_type=BYTES, headers={HEADER_LENGTH: str(json_length)})

    @routes.get("")
    async def server_metadata() -> dict[str, Any]:
        """Return name, version and extensions of the server."""
        return {"name": "incipit", "version": version, "extensions": EXTENSIONS}

    @routes.get("/health/live")
    async def server_live() -> dict[str, bool]:
        """Answer as long as the process does."""
        return {"live": True}

    @routes.get("/health/ready")
    async def server_ready() -> dict[str, bool]:
        """Answer 200 once every model has run."""
        if not engine.ready:
            raise Unavailable("server", "not ready", "a request after every model has run once")
        return {"ready": True}

    @routes.get("/models/{name}")
    @routes.get("/models/{name}/versions/{version}")
    async def metadata(name: str, version: str | None = None) -> dict[str, Any]:
        """Return inputs and outputs of a model."""
        model = engine.repository.find(name, version)
        versions = engine.repository.versions(name) if version is None else [model.version]
        return model_metadata(model.name, versions, model.manifest)

    @routes.get("/models/{name}/ready")
    @routes.get("/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> dict[str, Any]:
        """Answer 200 for a model that is served."""
        return {"name": engine.repository.find(name, version).name, "ready": engine.ready}

    @routes.post("/models/{name}/infer", openapi_extra=INFER_BODY)
    @routes.post("/models/{name}/versions/{version}/infer", openapi_extra=INFER_BODY)
    async def model_infer(request: Request, name: str, version: str | None = None) -> Response:
        """Return the outputs asked for, `embeddings` by default; inputs other than `input_ids` may be left out."""
        return await infer(request, name, version)

    return routes
