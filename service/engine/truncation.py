"""Truncates rows that are too long, where the caller says so.

A row keeps as many real tokens as there is room for, from the side without a cut. Padding between them stays and
needs no room. The special tokens around a text stay too, and need room.

Letters: B batch, T tokens of all rows.
"""

from dataclasses import replace

import numpy as np

from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.types import Bools, Int64, TokenRequest
from preblock.service.engine.positions import count_real, position_limit, real_tokens

SIDES = ("left", "right")


def min_row_tokens(request: TokenRequest, manifest: Manifest) -> Int64:
    """Return the tokens that each row must have room for, int64 (B,): all, or the fixed ones and one more."""
    real = count_real(request, manifest)
    if request.truncate is None:
        return real
    special = (
        0 if request.special is None else np.add.reduceat(request.special, request.input_ids.starts, dtype=np.int64)
    )
    return np.minimum(real, special + 1)


def truncate(request: TokenRequest, manifest: Manifest) -> TokenRequest:
    """Return a checked `request` with rows that fit; the same request where no cut is asked for."""
    if request.truncate is None:
        return request
    rows = request.input_ids
    real = real_tokens(request, manifest)
    counted: Int64 = np.ones_like(rows.values) if real is None else real
    room = position_limit(request, manifest) - (np.zeros(1, np.int64) if request.offset is None else request.offset)
    special: Bools = np.zeros(len(rows.values), np.bool_) if request.special is None else request.special
    room = room - np.add.reduceat(special, rows.starts, dtype=np.int64)
    counted = counted * ~special
    before = np.cumsum(counted) - counted
    rank = before - rows.spread(before[rows.starts])
    if request.truncate == "left":
        rank = rows.spread(np.add.reduceat(counted, rows.starts)) - counted - rank
    keep = (rank + counted <= rows.spread(room)) | special
    return replace(
        request,
        input_ids=rows.kept(keep),
        attention_mask=None if request.attention_mask is None else request.attention_mask.kept(keep),
        indices={name: index.kept(keep) for name, index in request.indices.items()},
        special=None if request.special is None else request.special[keep],
        spans=None if request.spans is None else request.spans[keep],
    )
