"""Content codings: bodies that come compressed, and answers that go so (RFC 9110, sections 8.4 and 12.5.3)."""

import zlib
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from incipit.service.engine import Engine
from incipit.service.errors import Malformed, TooLarge

CODINGS = {"gzip": 31, "deflate": 15}
"""The window bits by which zlib knows them."""
EXPANSION = 1032
"""A byte becomes at most as many."""
LEVEL = 1
LEAST = 1024
"""Bytes of the smallest answer that is worth it."""


def expand(body: bytes, coding: str, limit: int) -> bytes:
    """Return what was compressed, of at most `limit` bytes; what is longer is not expanded any further.

    Raises:
        TooLarge: it is longer.
        Malformed: it is not of that coding, has no end, or goes on behind it.

    """
    inflate = zlib.decompressobj(CODINGS[coding])
    try:
        content = inflate.decompress(body, limit + 1)
    except zlib.error as error:
        raise Malformed("body", f"no {coding}: {error}", f"a body that is compressed as {coding}") from error
    if len(content) > limit:
        raise TooLarge("body", f"more than {limit} bytes once it is expanded", f"at most {limit} bytes")
    if not inflate.eof or inflate.unused_data:
        got = f"{len(inflate.unused_data)} bytes behind the end" if inflate.eof else "no end"
        raise Malformed("body", got, f"a body that is compressed as {coding}, whole")
    return content


def wanted(accept: str, text: bool) -> str | None:
    """Return the coding that `Accept-Encoding` asks for, or None.

    HTTP libraries accept codings without being told to. Numbers as `text` shrink by half, so that is taken as a wish.
    Bytes and base64 shrink by a tenth, and take many times longer than without: for them one coding has to be named,
    alone.
    """
    qualities: dict[str, float] = {}
    for item in accept.lower().split(","):
        coding, _, weight = (part.strip() for part in item.partition(";"))
        try:
            qualities[coding] = float(weight.removeprefix("q=")) if weight else 1.0
        except ValueError:
            return None
    if not text and len(qualities) != 1:
        return None
    best = max((*CODINGS, "identity"), key=lambda coding: qualities.get(coding, 0.0))
    return best if best in CODINGS and qualities.get(best, 0.0) > 0 else None


async def encode(response: Response, request: Request, engine: Engine, text: bool) -> Response:
    """Return `response`, compressed where `request` asks for it; `text` says whether it holds numbers as text."""
    accept = request.headers.get("accept-encoding")
    coding = wanted(accept, text) if accept else None
    if coding is None or int(response.headers["Content-Length"]) < LEAST:
        return response
    deflate = zlib.compressobj(LEVEL, wbits=CODINGS[coding])
    if isinstance(response, StreamingResponse):
        response.body_iterator = _compressed(response.body_iterator, deflate)
        del response.headers["Content-Length"]
    else:
        size = len(response.body)
        response.body = await engine.scheduler.run(
            size, lambda: deflate.compress(response.body) + deflate.flush(), text=True
        )
        response.headers["Content-Length"] = str(len(response.body))
    response.headers["Content-Encoding"] = coding
    response.headers["Vary"] = "Accept-Encoding"
    return response


async def _compressed(parts: AsyncIterable[Any], deflate: Any) -> AsyncIterator[bytes]:
    async for part in parts:
        # Not by the scheduler, which may refuse: the answer has begun.
        yield await run_in_threadpool(deflate.compress, part)
    yield deflate.flush()
