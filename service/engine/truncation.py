"""Truncation of rows, on request.

A row keeps as many real tokens as fit, from the side opposite to the cut. Padding between kept tokens stays, and does
not count. Special tokens of a tokenizer stay too, and count.

Letters: B batch, T tokens of all rows.
"""

import numpy as np

from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.types import Bools, Int64, TokenRequest
from preblock.service.engine.positions import count_real, position_limit, real_tokens

SIDES = ("left", "right")


def min_row_tokens(request: TokenRequest, manifest: Manifest) -> Int64:
    """Return the fewest real tokens of each row after truncation, int64 (B,): special tokens and one other."""
    real = count_real(request, manifest)
    return real if request.truncate is None else np.minimum(real, _special_tokens(request) + 1)


def truncate(request: TokenRequest, manifest: Manifest) -> TokenRequest:
    """Return a validated request with `truncate`, its rows cut to the position limit and `max_length`."""
    rows = request.input_ids
    real = real_tokens(request, manifest)
    counted: Int64 = np.ones_like(rows.values) if real is None else real
    start = 0 if request.offset is None else request.offset
    room = position_limit(request, manifest) - start
    if request.max_length is not None:
        room = np.minimum(room, request.max_length)
    room = room - _special_tokens(request)
    special: Bools = np.zeros(len(rows.values), np.bool_) if request.special is None else request.special
    counted = counted * ~special
    before = np.cumsum(counted) - counted
    rank = before - rows.spread(before[rows.starts])
    if request.truncate == "left":
        rank = rows.spread(np.add.reduceat(counted, rows.starts)) - counted - rank
    keep = (rank + counted <= rows.spread(room)) | special
    return request.change_rows(
        lambda values: values.kept(keep),
        special=None if request.special is None else request.special[keep],
        spans=None if request.spans is None else request.spans[keep],
    )


def _special_tokens(request: TokenRequest) -> Int64:
    """Return the number of special tokens of each row, int64 (B,)."""
    if request.special is None:
        return np.zeros_like(request.input_ids.lengths)
    counts: Int64 = np.add.reduceat(request.special, request.input_ids.starts, dtype=np.int64)
    return counts
