"""Which calls run in tiles, and how they are cut.

The graph of tiles gives the vectors of the plain graph bit for bit, a tile of tokens at a time: what is between stays
in the cache of the processor, where a large call of the plain graph goes through memory for every step.

Letters: B batch, L length, T tokens of all rows, N tiles.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.types import Int64

PIECE = 3 * 2**16
"""Values of a piece of a large answer: what is computed while nobody else is answered, and then sent from the cache."""
ROW = 4
"""Rows of at least this part of a tile may be tiles themselves: what all rows share is then computed once."""


def tile(feeds: Mapping[str, NDArray[np.int64]], manifest: Manifest) -> dict[str, Int64] | None:
    """Return the feeds of the graph of tiles that stand for `feeds`, or None where the plain graph serves better.

    The first T vectors that the graph gives for them are those of the call, row by row. What fills the last tile up is
    id 0 at offset 0.
    """
    tiles, ids, offset = manifest.tiles, feeds["input_ids"], feeds["offset"]
    if tiles is None or ids.size < tiles.least:
        return None
    batch, length = ids.shape
    if offset.size == 1 and batch > 1 and length * ROW >= tiles.size:
        return dict(feeds)
    if length > 1 and manifest.counts != "slots":
        return None  # how many real tokens precede one, only the graph counts
    return cut(feeds, offset.reshape(-1, 1) + np.arange(length), tiles.size)


def pieces(feeds: Mapping[str, Int64], most: int) -> Iterator[dict[str, Int64]]:
    """Yield feeds of at most `most` tokens, whose vectors, one after another, are those of `feeds`.

    No more of them than it takes, each about as large as the others. Rows that are longer are cut too: for a graph that
    counts slots alone.
    """
    batch, length = feeds["input_ids"].shape
    offset = feeds["offset"]
    if length <= most:
        rows = _even(batch, most // length)
        for row in range(0, batch, rows):
            piece = {name: values[row : row + rows] for name, values in feeds.items()}
            yield piece if len(offset) > 1 else piece | {"offset": offset}
        return
    most = _even(length, most)
    tokens = {name: values for name, values in feeds.items() if name != "offset"}
    for row in range(batch):
        start = offset[row : row + 1] if len(offset) > 1 else offset
        for begin in range(0, length, most):
            piece = {name: values[row : row + 1, begin : begin + most] for name, values in tokens.items()}
            yield piece | {"offset": start + begin}


def _even(whole: int, most: int) -> int:
    """Return how many of a `whole` are in a part, where as few parts as there can be have at most so many."""
    return -(-whole // -(-whole // most))


def cut(feeds: Mapping[str, NDArray[np.int64]], offsets: Int64, size: int) -> dict[str, Int64]:
    """Return `feeds` in tiles of `size` tokens, each a row of its own at the offset that `offsets` (1 or B, L) has."""
    shape = feeds["input_ids"].shape
    tiles = {name: _cut(values, size) for name, values in feeds.items() if name != "offset"}
    return tiles | {"offset": _cut(np.broadcast_to(offsets, shape), size).reshape(-1)}


def _cut(values: Int64, size: int) -> Int64:
    """Return `values` (B, L) as (N, size), filled up with zeros."""
    flat = values.reshape(-1)
    missing = -flat.size % size
    return (np.concatenate((flat, np.zeros(missing, np.int64))) if missing else flat).reshape(-1, size)
