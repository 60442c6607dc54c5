"""Requests over HTTP: path, query, headers, route, and bodies with their content encodings (RFC 9110, section 8.4)."""

import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope

from preblock.service.core.errors import Invalid, Malformed, TooLarge, UnsupportedFormat
from preblock.service.engine.engine import Engine
from preblock.service.observability.context import RequestRecord


class RawRequest:
    """A request with a faster header lookup than Starlette's.

    Args:
        scope: ASGI scope with path, query and headers.
        receive: ASGI channel of the body.
        body: complete body, if it has already arrived; default None.

    """

    __slots__ = ("_fields", "body", "receive", "scope")

    def __init__(self, scope: Scope, receive: Receive, body: bytes | None = None) -> None:
        self.scope = scope
        self.receive = receive
        self.body = body
        self._fields: dict[bytes, bytes] = dict(reversed(scope["headers"]))

    @classmethod
    def of(cls, request: Request) -> "RawRequest":
        """Convert a request of FastAPI."""
        return cls(request.scope, request.receive)

    @property
    def query(self) -> bytes:
        """The query string."""
        return bytes(self.scope["query_string"])

    def list_header(self, name: bytes) -> str:
        """Return all headers with a lower-case name, joined by commas (RFC 9110, section 5.3); "" without one."""
        if name not in self._fields:
            return ""
        return ", ".join(value.decode("latin-1") for other, value in self.scope["headers"] if other == name)

    def header(self, name: bytes) -> str | None:
        """Return the first header with a lower-case name; None without one."""
        value = self._fields.get(name)
        return None if value is None else value.decode("latin-1")


Handler = Callable[[RawRequest, str, str | None], Awaitable[Response]]
"""Answers a request for a model by its name and its version; None stands for the highest version."""


class Route(NamedTuple):
    """The route of a tensor request.

    Args:
        handler: answers the request.
        name: model name in the path.
        version: model version in the path; None for the highest version.
        pattern: path pattern, such as `/models/{name}/embed`.
        path: path of the request.
        query: query of the request; empty if the route was found by its path.

    """

    handler: Handler
    name: str
    version: str | None
    pattern: str
    path: str
    query: bytes


@lru_cache  # clients repeat their URLs
def single_values(query: bytes) -> Mapping[str, str]:
    """Return the parameters of a query string by name.

    Raises:
        Invalid: a parameter occurs more than once.

    """
    parameters = QueryParams(query)
    for name in parameters:
        count = len(parameters.getlist(name))
        if count > 1:
            message = f"the query has {count} values of {name}; send one, and write a list as [1,2]"
            raise Invalid(name, f"{count} values", "one value", message=message)
    return MappingProxyType(dict(parameters))


def merge_fields(query: Mapping[str, Any], body: Mapping[str, Any], place: str = "body") -> dict[str, Any]:
    """Return the fields of the query and of the body together; errors name the body as `place`.

    Raises:
        Invalid: a field is in both.

    """
    for name in query:
        if name in body:
            message = f"{name} is both in the query and in the {place}; send it in one of them"
            raise Invalid(name, "two values", "one value", message=message)
    return {**query, **body}


WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""Window bits of zlib for each content encoding."""
MAX_EXPANSION = 1032
"""Maximum ratio of the decompressed size to the compressed size."""
MAX_INPUT_BYTES, MAX_OUTPUT_BYTES = 2**16, 2**18
"""Maximum input and output bytes of one call of zlib, which joins its output while it holds the GIL."""


def expand(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body; decompression stops at `limit` bytes.

    Raises:
        TooLarge: the decompressed body is larger.
        Malformed: the body is not in this encoding, is incomplete, or has other bytes after its end.

    """
    inflate = zlib.decompressobj(WINDOW_BITS[encoding])
    chunks: list[bytes] = []
    size = read = 0
    rest, pending = b"", False
    try:
        while rest or pending or read < len(body):
            if inflate.eof:
                if encoding != "gzip":
                    break
                inflate = zlib.decompressobj(WINDOW_BITS[encoding])  # of the next member (RFC 1952, section 2.2)
            if not rest and not pending:
                rest = body[read : read + MAX_INPUT_BYTES]
                read += len(rest)
            chunk = inflate.decompress(rest, MAX_OUTPUT_BYTES)
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise TooLarge("body", f"more than {limit} bytes after decompression", f"at most {limit} bytes")
            rest = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            pending = len(chunk) == MAX_OUTPUT_BYTES and not inflate.eof
    except zlib.error as error:
        raise Malformed("body", f"invalid {encoding} data: {error}", f"valid {encoding} data") from error
    after = len(rest) + len(body) - read
    if not inflate.eof or after:
        got = f"{after} bytes after the end of the data" if inflate.eof else "incomplete data"
        raise Malformed("body", got, f"complete {encoding} data")
    return b"".join(chunks)


async def read_body(
    request: RawRequest, engine: Engine, record: RequestRecord | None, most: int | None = None
) -> bytes:
    """Return the complete, decompressed body, and reserve memory for it until the handler of the request returns.

    Args:
        request: with the body.
        engine: runs the decompression.
        record: of the request; None if `most` is too low for a large body.
        most: maximum bytes, before and after decompression, within the limit of all bodies; default: that limit.

    Raises:
        TooLarge: the body is larger; a larger declared length is rejected before the body is read.
        Malformed: the declared length is not a number, the client left early, or the compressed data is broken.
        UnsupportedFormat: the content encoding is unknown.
        Unavailable: too many large bodies wait for memory, or this one takes too long to arrive, or waits too long.

    """
    limit = engine.limits.max_body_bytes if most is None else min(most, engine.limits.max_body_bytes)
    encoding = request.list_header(b"content-encoding").lower() or "identity"
    encoding = "gzip" if encoding == "x-gzip" else encoding  # RFC 9110, section 8.4.1.3
    if encoding != "identity" and encoding not in WINDOW_BITS:
        raise UnsupportedFormat("Content-Encoding", encoding, ", ".join(("identity", *WINDOW_BITS)))
    declared = request.header(b"content-length")
    if declared is not None:
        if not declared.isascii() or not declared.isdigit():
            raise Malformed("Content-Length", declared, "a number of bytes")
        if len(declared) > 20 or int(declared) > limit:
            raise TooLarge("body", f"{declared} bytes", f"at most {limit} bytes")
    expansion = 1 if encoding == "identity" else MAX_EXPANSION

    async def reserve(size: int) -> None:
        if record is not None:
            await engine.admission.reserve(record, min(expansion * size, limit))

    first, more = (request.body, False) if request.body is not None else await _receive(request, limit, 0)
    chunks, received = [first], len(first)
    if more:
        async with engine.limits.incoming.arrive() as body:
            while more:
                await body.wait(received)
                chunk, more = await _receive(request, limit, received)
                chunks.append(chunk)
                received += len(chunk)
            body.complete()
            await reserve(received)
    else:
        await reserve(received)
    # Fresh memory of many pages is slow, and a join of a mebibyte and more releases the GIL.
    content = chunks[0] if len(chunks) == 1 else await engine.scheduler.run(received, lambda: b"".join(chunks))
    if encoding == "identity":
        return content
    return await engine.scheduler.run(MAX_EXPANSION * received, lambda: expand(content, encoding, limit))


async def _receive(request: RawRequest, limit: int, received: int) -> tuple[bytes, bool]:
    """Return the next bytes after the `received` ones, and whether more follow."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        # nobody reads this error, but the metrics count it
        raise Malformed("body", f"{received} bytes before the client disconnected", "a complete body")
    chunk: bytes = message.get("body", b"")
    if received + len(chunk) > limit:
        raise TooLarge("body", f"more than {limit} bytes", f"at most {limit} bytes")
    return chunk, message.get("more_body", False)
