"""Bodies: reading those of requests within a limit, and compressing those of responses."""

import zlib

from preblock.service.api.http.compression import (
    MAX_EXPANSION,
    MIN_COMPRESSED_BYTES,
    WINDOW_BITS,
    choose_coding,
    expand,
)
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.response import ChunkedResponse
from preblock.service.codecs.chunks import PACKET, joined
from preblock.service.core.errors import Malformed, TooLarge, UnsupportedFormat
from preblock.service.engine.engine import Engine


async def read_body(request: RawRequest, engine: Engine, limit: int) -> bytes:
    """Return the complete body without its compression; `limit` bytes hold before and after expansion.

    Raises:
        TooLarge: the body is larger; a larger declared length is rejected before the body is read.
        Malformed: the declared length is not a number, the client left early, or the compressed data is broken.
        UnsupportedFormat: the content encoding is unknown.

    """
    coding = (request.header(b"content-encoding") or "identity").lower()
    if coding != "identity" and coding not in WINDOW_BITS:
        raise UnsupportedFormat("Content-Encoding", coding, ", ".join(("identity", *WINDOW_BITS)))
    declared = request.header(b"content-length")
    if declared is not None:
        if not declared.isascii() or not declared.isdigit():
            raise Malformed("Content-Length", declared, "a number of bytes")
        if len(declared) > 20 or int(declared) > limit:
            raise TooLarge("body", f"{declared} bytes", f"at most {limit} bytes")
    body = await _receive(request, limit) if request.body is None else request.body
    if coding == "identity":
        return body
    return await engine.scheduler.run(MAX_EXPANSION * len(body), lambda: expand(body, coding, limit))


async def write_body(response: ChunkedResponse, request: RawRequest, engine: Engine, text: bool) -> ChunkedResponse:
    """Return `response`, compressed if `request` accepts it. `text` states whether it holds numbers as text.

    A large response counts as a concurrent request of `engine` until it is sent.

    Raises:
        TooLarge: the client speaks HTTP/1.0, and the response of unknown size exceeds the limit of buffered responses.

    """
    parts, size = response.parts, response.size
    accept = request.header(b"accept-encoding")
    coding = choose_coding(accept, text) if accept else None
    if coding is not None and (size is None or size >= MIN_COMPRESSED_BYTES):
        compressor = zlib.compressobj(1, wbits=WINDOW_BITS[coding])
        response.compress(coding, compressor)
        if size is not None and size <= PACKET:
            response.set_content(
                await engine.scheduler.run(
                    size, lambda: compressor.compress(joined(parts)) + compressor.flush(), text=True
                )
            )
    if response.size is None and request.scope["http_version"] == "1.0":  # HTTP/1.0 has no chunked transfer encoding
        await response.buffer(engine.limits.max_buffered_bytes)
    response.sending = engine.limits.extend
    return response


async def _receive(request: RawRequest, limit: int) -> bytes:
    chunks, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":  # nobody reads this error, but the metrics count it
            raise Malformed("body", f"{size} bytes and no end", "a whole body")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise TooLarge("body", f"more than {limit} bytes", f"at most {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
