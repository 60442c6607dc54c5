"""Bodies of requests, read within the limit, and of answers, as they are sent."""

from preblock.service.api.http.compression import CODINGS, EXPANSION, encode, expand, wanted
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.response import ChunkedResponse
from preblock.service.core.errors import Malformed, TooLarge, UnsupportedFormat
from preblock.service.engine.engine import Engine


async def read_body(arrival: RawRequest, engine: Engine, limit: int) -> bytes:
    """Return the whole body, expanded where it is compressed, of at most `limit` bytes before and after.

    Raises:
        TooLarge: it is longer; a declared length is refused before anything is read.
        Malformed: the declared length is no number, the client left before the end, or the coding is broken.
        UnsupportedFormat: the coding is unknown.

    """
    coding = (arrival.header(b"content-encoding") or "identity").lower()
    if coding != "identity" and coding not in CODINGS:
        raise UnsupportedFormat("Content-Encoding", coding, ", ".join(("identity", *CODINGS)))
    declared = arrival.header(b"content-length")
    if declared is not None:
        if not declared.isascii() or not declared.isdigit():
            raise Malformed("Content-Length", declared, "a number of bytes")
        if len(declared) > 20 or int(declared) > limit:
            raise TooLarge("body", f"{declared} bytes", f"at most {limit} bytes")
    body = await _received(arrival, limit) if arrival.body is None else arrival.body
    if coding == "identity":
        return body
    return await engine.scheduler.run(EXPANSION * len(body), lambda: expand(body, coding, limit))


async def write_body(reply: ChunkedResponse, arrival: RawRequest, engine: Engine, text: bool) -> ChunkedResponse:
    """Return `reply`, compressed where `arrival` asks for it; `text` says whether it holds numbers as text.

    A large one counts as answered now, within the limits of `engine`, until it was sent.

    Raises:
        TooLarge: HTTP/1.0 has to be told its size, and it is larger than what may be made whole.

    """
    accept = arrival.header(b"accept-encoding")
    if accept and (coding := wanted(accept, text)):
        await encode(reply, coding, engine)
    if reply.size is None and arrival.scope["http_version"] == "1.0":  # HTTP/1.0 has no chunks
        await reply.join(engine.limits.max_buffered_bytes)
    reply.sending = engine.limits.extend
    return reply


async def _received(arrival: RawRequest, limit: int) -> bytes:
    chunks, size, more = [], 0, True
    while more:
        message = await arrival.receive()
        if message["type"] == "http.disconnect":  # no client reads the answer, but it counts as an error of the client
            raise Malformed("body", f"{size} bytes and no end", "a whole body")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise TooLarge("body", f"more than {limit} bytes", f"at most {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
