"""Content codings of requests and answers (RFC 9110, sections 8.4 and 12.5.3)."""

import zlib
from functools import lru_cache

from preblock.service.api.http.response import ChunkedResponse
from preblock.service.codecs.chunks import MAX_CHUNK_BYTES, join
from preblock.service.core.errors import Malformed, TooLarge
from preblock.service.engine.engine import Engine

CODINGS = {"gzip": 31, "deflate": 15}
"""Window bits of zlib for each coding."""
EXPANSION = 1032
"""A byte becomes at most as many."""
LEVEL = 1
LEAST = 1024
"""Bytes of the smallest answer worth compressing."""


def expand(body: bytes, coding: str, limit: int) -> bytes:
    """Return the expanded content, of at most `limit` bytes; expansion stops there.

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


@lru_cache  # a client says the same again and again
def wanted(accept: str, text: bool) -> str | None:
    """Return the coding that `Accept-Encoding` asks for, or None.

    HTTP libraries accept codings without being told to. Numbers as `text` shrink by half, so any accepted coding is
    used.
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


async def encode(reply: ChunkedResponse, coding: str, engine: Engine) -> None:
    """Compress an answer, unless it is too small to be worth it: by `engine`, or a large one while it is sent."""
    parts, size = reply.parts, reply.size
    if size is not None and size < LEAST:
        return
    deflate = zlib.compressobj(LEVEL, wbits=CODINGS[coding])
    if size is None or size > MAX_CHUNK_BYTES:
        reply.compressed(coding, None, deflate)
    else:
        content = await engine.scheduler.run(size, lambda: deflate.compress(join(parts)) + deflate.flush(), text=True)
        reply.compressed(coding, content)
