"""Cuts large calls into chunks.

Letters: B batch, L length.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from preblock.service.artifacts.names import CONTEXT
from preblock.service.core.types import Int64

CHUNK_VALUES = 3 * 2**16
"""Values of a chunk of a large response. A chunk blocks other requests, and is sent from the processor's cache."""


def split_feeds(feeds: Mapping[str, Int64], max_tokens: int) -> Iterator[dict[str, Int64]]:
    """Split `feeds` (B, L) into the fewest feeds of at most `max_tokens` tokens, all about equally large.

    Each gets its own part of `context` (B, H), if there is one.

    Their vectors, in order, equal the vectors of `feeds`. Rows over `max_tokens` tokens are cut too; this requires a
    model with `counts` of "slots".
    """
    batch, length = feeds["input_ids"].shape
    offset = feeds["offset"]
    if length <= max_tokens:
        rows = _part_size(batch, max_tokens // length)
        for row in range(0, batch, rows):
            chunk = {name: values[row : row + rows] for name, values in feeds.items()}
            yield chunk if len(offset) > 1 else chunk | {"offset": offset}
        return
    max_tokens = _part_size(length, max_tokens)
    tokens = {name: values for name, values in feeds.items() if name not in ("offset", CONTEXT)}
    history = feeds[CONTEXT].shape[1] if CONTEXT in feeds else 0
    ids = np.concatenate((feeds[CONTEXT], feeds["input_ids"]), axis=1) if history else feeds["input_ids"]
    for row in range(batch):
        start = offset[row : row + 1] if len(offset) > 1 else offset
        for begin in range(0, length, max_tokens):
            chunk = {name: values[row : row + 1, begin : begin + max_tokens] for name, values in tokens.items()}
            if history:
                chunk[CONTEXT] = ids[row : row + 1, begin : begin + history]
            yield chunk | {"offset": start + begin}


def _part_size(whole: int, most: int) -> int:
    """Return the size of equal parts of `whole`: as few parts as possible, of at most `most` each."""
    return -(-whole // -(-whole // most))
