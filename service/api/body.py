"""Reads request bodies, within the limit."""

from fastapi import Request
from starlette.requests import ClientDisconnect

from incipit.service.errors import Malformed, TooLarge, UnsupportedFormat


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body, of at most `limit` bytes.

    Raises:
        TooLarge: it is longer; a declared length is refused before anything is read.
        Malformed: the declared length is no number, or the client left before the end.
        UnsupportedFormat: it is compressed.

    """
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise UnsupportedFormat("Content-Encoding", coding, "identity")
    allowed = f"at most {limit} bytes"
    declared = request.headers.get("content-length")
    if declared is not None:
        if not declared.isascii() or not declared.isdigit():
            raise Malformed("Content-Length", declared, "a number of bytes")
        if len(declared) > 20 or int(declared) > limit:
            raise TooLarge("body", f"{declared} bytes", allowed)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise TooLarge("body", f"more than {limit} bytes", allowed)
            chunks.append(chunk)
    except ClientDisconnect as error:  # nobody reads the answer, but it is counted as what it is
        raise Malformed("body", f"{size} bytes and no end", "a whole body") from error
    return b"".join(chunks)
