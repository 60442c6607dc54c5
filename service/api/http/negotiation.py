"""The content types of bodies and answers (RFC 9110, sections 8.3 and 12.5.1)."""

import math
from functools import lru_cache

from preblock.service.core.errors import NotAcceptable, UnsupportedFormat

JSON = "application/json"
BYTES = "application/octet-stream"
NPY = "application/x-npy"
SAFETENSORS = "application/x-safetensors"
NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"


@lru_cache  # a client says the same again and again
def body_type(content_type: str | None, readable: tuple[str, ...]) -> str:
    """Return the type of a body, without parameters; the first of `readable` where none is stated.

    Raises:
        UnsupportedFormat: it is not `readable`.

    """
    if content_type is None:
        return readable[0]
    media = content_type.partition(";")[0].strip().lower()
    if media not in readable:
        raise UnsupportedFormat("Content-Type", content_type, " or ".join(readable))
    return media


@lru_cache
def answer_type(accept: str | None, writable: tuple[str, ...], reason: str = "") -> str:
    """Return the type of `writable` that `accept` prefers; the first of `writable` where it has no opinion.

    `reason` says why no other type is writable.

    Raises:
        NotAcceptable: `accept` rules all of them out.

    """
    if not accept:
        return writable[0]
    qualities = _parse(accept)
    best = max(writable, key=lambda media: _quality(media, qualities))
    if _quality(best, qualities) == 0:
        raise NotAcceptable("Accept", accept, f"{' or '.join(writable)} {reason}".rstrip())
    return best


def _quality(media: str, qualities: dict[str, float]) -> float:
    """Return how much a type is wanted: the most specific range decides."""
    for media_range in (media, media.partition("/")[0] + "/*", "*/*"):
        if media_range in qualities:
            return qualities[media_range]
    return 0.0


def _parse(accept: str) -> dict[str, float]:
    qualities = {}
    for item in accept.split(","):
        media, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = math.nan
                if not 0 <= quality <= 1:
                    raise NotAcceptable("Accept", accept, "quality values from 0 to 1")
        qualities[media] = quality
    return qualities
