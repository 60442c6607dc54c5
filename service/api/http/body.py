"""Bodies of requests and responses, with their content encodings (RFC 9110, sections 8.4 and 12.5.3)."""

import zlib
from functools import lru_cache

from preblock.service.api.http.negotiation import read_qualities
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.response import ChunkedResponse
from preblock.service.codecs.chunks import MAX_CHUNK_BYTES, join
from preblock.service.core.errors import Malformed, TooLarge, UnsupportedFormat
from preblock.service.engine.engine import Engine
from preblock.service.observability.context import RequestRecord

WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""Window bits of zlib for each content encoding."""
MAX_EXPANSION = 1032
"""Maximum ratio of the decompressed size to the compressed size."""
MAX_INPUT_BYTES, MAX_OUTPUT_BYTES = 2**16, 2**18
"""Maximum input and output bytes of one call of zlib, which joins its output while it holds the GIL."""
MIN_COMPRESSED_BYTES = 1024
"""A smaller response is sent without compression."""


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


@lru_cache  # clients repeat their headers
def choose_encoding(accept: str, text: bool) -> str | None:
    """Return the content encoding for a response to `Accept-Encoding: {accept}`; None for no compression.

    HTTP libraries accept encodings by default. Numbers as `text` shrink by half, so any accepted encoding is used. Raw
    bytes and base64 shrink by a tenth, and compression multiplies their response time. So the header must then name
    exactly one encoding.
    """
    try:
        qualities = read_qualities(accept)
    except ValueError:
        return None
    if not text and len(qualities) != 1:
        return None
    best = max((*WINDOW_BITS, "identity"), key=lambda encoding: qualities.get(encoding, 0.0))
    return best if best in WINDOW_BITS and qualities.get(best, 0.0) > 0 else None


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


async def write_body(response: ChunkedResponse, request: RawRequest, engine: Engine, text: bool) -> ChunkedResponse:
    """Return `response`, compressed if `request` accepts it. `text` states whether it holds numbers as text.

    A large response counts as a concurrent request of `engine` until it is sent.
    """
    parts, size = response.parts, response.size
    accept = request.list_header(b"accept-encoding")
    encoding = choose_encoding(accept, text) if accept else None
    if encoding is not None and (size is None or size >= MIN_COMPRESSED_BYTES):
        compressor = zlib.compressobj(zlib.Z_BEST_SPEED, wbits=WINDOW_BITS[encoding])
        response.compress(encoding, compressor)
        if size is not None and size <= MAX_CHUNK_BYTES:

            def compress() -> bytes:
                return compressor.compress(join(parts)) + compressor.flush()

            response.set_content(await engine.scheduler.run(size, compress, text=True))
    response.sending, response.turns = engine.limits.extend, engine.limits.turns
    return response


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
