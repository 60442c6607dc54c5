"""Cuts large calls into chunks.

Letters: B batch, L length.
"""

from collections.abc import Iterator, Mapping

from preblock.service.core.types import Int64

CHUNK_VALUES = 3 * 2**16
"""Values of a chunk of a large response. A chunk blocks other requests, and is sent from the processor's cache."""


def split_feeds(feeds: Mapping[str, Int64], most: int) -> Iterator[dict[str, Int64]]:
    """Split `feeds` (B, L) into the fewest feeds of at most `most` tokens, all about equally large.

    Their vectors, in order, equal the vectors of `feeds`. Rows over `most` tokens are cut too; this requires a model
    with `counts` of "slots".
    """
    batch, length = feeds["input_ids"].shape
    offset = feeds["offset"]
    if length <= most:
        rows = _even(batch, most // length)
        for row in range(0, batch, rows):
            chunk = {name: values[row : row + rows] for name, values in feeds.items()}
            yield chunk if len(offset) > 1 else chunk | {"offset": offset}
        return
    most = _even(length, most)
    tokens = {name: values for name, values in feeds.items() if name != "offset"}
    for row in range(batch):
        start = offset[row : row + 1] if len(offset) > 1 else offset
        for begin in range(0, length, most):
            chunk = {name: values[row : row + 1, begin : begin + most] for name, values in tokens.items()}
            yield chunk | {"offset": start + begin}


def _even(whole: int, most: int) -> int:
    """Return the size of equal parts of `whole`: as few parts as possible, of at most `most` each."""
    return -(-whole // -(-whole // most))
