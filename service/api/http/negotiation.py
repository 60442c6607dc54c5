"""Content types of requests and responses (RFC 9110, sections 8.3 and 12.5.1)."""

from functools import lru_cache

from preblock.service.core.errors import NotAcceptable, UnsupportedFormat

JSON = "application/json"
BYTES = "application/octet-stream"
NPY = "application/x-npy"
SAFETENSORS = "application/x-safetensors"
NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"
FORM = "application/x-www-form-urlencoded"


@lru_cache  # clients repeat their headers
def body_type(content_type: str | None, readable: tuple[str, ...]) -> str:
    """Return the content type of a body without its parameters; the default is the first `readable` type.

    A form counts as JSON, because `curl -d` declares every body as a form. No web page gains by this. Any page may send
    JSON without a `Content-Type`, but it cannot read the response or send a key without the permission of
    `cors_origins`. There are no cookies, and the dispatcher checks the origin of every POST.

    Raises:
        UnsupportedFormat: the type is not in `readable`.

    """
    if content_type is None:
        return readable[0]
    media = content_type.partition(";")[0].strip().lower()
    if media == FORM and JSON in readable:
        return JSON
    if media not in readable:
        raise UnsupportedFormat("Content-Type", content_type, " or ".join(readable))
    return media


@lru_cache
def answer_type(accept: str | None, writable: tuple[str, ...], reason: str = "") -> str:
    """Return the type of `writable` with the highest quality in the `Accept` header; the first of equals wins.

    Args:
        accept: values of the header; no value accepts every type.
        writable: possible types.
        reason: explains in an error why no other type is possible.

    Raises:
        NotAcceptable: the header excludes all types, or a quality is not a number from 0 to 1.

    """
    if not accept:
        return writable[0]
    try:
        qualities = read_qualities(accept)
    except ValueError as error:
        raise NotAcceptable("Accept", accept, "quality values from 0 to 1") from error

    def quality(media: str) -> float:
        """Return the quality of the most specific range."""
        ranges = (media, media.partition("/")[0] + "/*", "*/*")
        return next((qualities[media_range] for media_range in ranges if media_range in qualities), 0.0)

    best = max(writable, key=quality)
    if quality(best) == 0:
        raise NotAcceptable("Accept", accept, f"{' or '.join(writable)} {reason}".rstrip())
    return best


def read_qualities(header: str) -> dict[str, float]:
    """Return the quality of each item of an `Accept` or `Accept-Encoding` header, by name; the default is 1.

    Of several qualities of one name, such as of versions of a type, the highest counts.

    Raises:
        ValueError: a quality is not a number from 0 to 1.

    """
    qualities: dict[str, float] = {}
    for item in header.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "q":
                quality = float(value)
        if not 0 <= quality <= 1:
            raise ValueError(header)
        qualities[name] = max(quality, qualities.get(name, 0.0))
    return qualities
