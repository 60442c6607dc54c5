"""Registration of the routes of a model: each has a path for the highest version and one for a named version."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request

from preblock.service.api.http.request import RawRequest

Endpoint = Callable[[RawRequest, str, str | None], Awaitable[Any]]
"""Answers a request for a model by its name and its version; None stands for the highest version."""


def add_model_routes(
    routes: APIRouter, method: str, action: str, endpoint: Endpoint, response_model: Any = None, **options: Any
) -> None:
    """Add `/models/{name}` and `/models/{name}/versions/{version}`, each with the suffix `action`, to `routes`.

    The name and the docstring of `endpoint` stand in the OpenAPI document. `options` go to FastAPI's `add_api_route`.
    """
    options |= {"methods": [method], "response_model": response_model, "description": endpoint.__doc__}

    async def newest(request: Request, name: str) -> Any:
        return await endpoint(RawRequest.of(request), name, None)

    async def version(request: Request, name: str, version: str) -> Any:
        return await endpoint(RawRequest.of(request), name, version)

    named = endpoint.__name__
    routes.add_api_route("/models/{name}" + action, newest, name=named, **options)
    routes.add_api_route("/models/{name}/versions/{version}" + action, version, name=f"{named}_version", **options)
