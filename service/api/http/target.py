"""What a request for tensors is for."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fastapi.responses import Response

from preblock.service.api.http.request import RawRequest

Handler = Callable[[RawRequest, str, str | None], Awaitable[Response]]
"""Answers a request for a model, by its name and its version, if one is named."""


class Route(NamedTuple):
    """What a request for tensors is for: the model, its version if one is named, and what answers.

    `route` is the pattern of its path. `path` and `query` are those of the request, where it was found by its address.
    """

    handler: Handler
    name: str
    version: str | None
    route: str
    path: str = ""
    query: bytes = b""
