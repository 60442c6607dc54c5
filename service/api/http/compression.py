"""Content encodings of requests and responses (RFC 9110, sections 8.4 and 12.5.3)."""

import zlib
from functools import lru_cache

from preblock.service.api.http.negotiation import read_qualities
from preblock.service.core.errors import Malformed, TooLarge

WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""Window bits of zlib for each content encoding."""
MAX_EXPANSION = 1032
"""Maximum ratio of the expanded size to the compressed size."""
MIN_COMPRESSED_BYTES = 1024
"""A smaller response is sent without compression."""


def expand(body: bytes, coding: str, limit: int) -> bytes:
    """Return the expanded body, at most `limit` bytes; the expansion stops at the limit.

    Raises:
        TooLarge: the expanded body is larger.
        Malformed: the body is not in this encoding, is incomplete, or has further bytes after its end.

    """
    inflate = zlib.decompressobj(WINDOW_BITS[coding])
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


@lru_cache  # clients repeat their headers
def choose_coding(accept: str, text: bool) -> str | None:
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
    best = max((*WINDOW_BITS, "identity"), key=lambda coding: qualities.get(coding, 0.0))
    return best if best in WINDOW_BITS and qualities.get(best, 0.0) > 0 else None
