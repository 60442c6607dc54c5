"""Cuts large calls into chunks.

Letters: B batch, L length.
"""

from collections.abc import Iterator, Mapping

from preblock.service.core.types import Int64

CHUNK_VALUES = 3 * 2**16
"""Values of a chunk of a large answer. No other request is answered meanwhile, and the chunk is sent from the cache."""


def split_feeds(feeds: Mapping[str, Int64], most: int) -> Iterator[dict[str, Int64]]:
    """Yield feeds of at most `most` tokens; their vectors in order are those of `feeds`.

    No more of them than it takes, each about as large as the others. Rows that are longer are cut too: for a graph that
    counts slots alone.
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
    """Return how many of a `whole` are in a part, where as few parts as there can be have at most so many."""
    return -(-whole // -(-whole // most))
