"""Reads request bodies, within the limit."""

from fastapi import Request

from incipit.service.api.coding import CODINGS, EXPANSION, expand
from incipit.service.engine import Engine
from incipit.service.errors import Malformed, TooLarge, UnsupportedFormat


async def read_body(request: Request, engine: Engine, limit: int) -> bytes:
    """Return the whole body, expanded where it is compressed, of at most `limit` bytes before and after.

    Raises:
        TooLarge: it is longer; a declared length is refused before anything is read.
        Malformed: the declared length is no number, the client left before the end, or it is not of its coding.
        UnsupportedFormat: it is of a coding that is not read.

    """
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity" and coding not in CODINGS:
        raise UnsupportedFormat("Content-Encoding", coding, ", ".join(("identity", *CODINGS)))
    allowed = f"at most {limit} bytes"
    declared = request.headers.get("content-length")
    if declared is not None:
        if not declared.isascii() or not declared.isdigit():
            raise Malformed("Content-Length", declared, "a number of bytes")
        if len(declared) > 20 or int(declared) > limit:
            raise TooLarge("body", f"{declared} bytes", allowed)
    chunks, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":  # nobody reads the answer, but it is counted as what it is
            raise Malformed("body", f"{size} bytes and no end", "a whole body")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise TooLarge("body", f"more than {limit} bytes", allowed)
        chunks.append(chunk)
    body = b"".join(chunks)
    if coding == "identity":
        return body
    return await engine.scheduler.run(EXPANSION * len(body), lambda: expand(body, coding, limit))
