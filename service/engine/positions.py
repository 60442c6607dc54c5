"""Counts positions: the real tokens of a request, and the number of real tokens before each token.

All families share one definition. The position index of a token is the offset plus the number of real tokens before it
in its row. A token is real unless its mask is 0. If the positions of a family skip padding ids, padding is never real.

Letters: B batch, T tokens of all rows.
"""

import numpy as np

from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.types import Int64, TokenRequest


def real_tokens(request: TokenRequest, manifest: Manifest) -> Int64 | None:
    """Return 1 for each real token and 0 for padding: int64 (T,); None if all tokens are real."""
    mask = None if request.attention_mask is None else request.attention_mask.values
    if manifest.counts == "ids":
        content = (request.input_ids.values != manifest.padding_id).astype(np.int64)
        mask = content if mask is None else content * mask
    return None if mask is None or mask.all() else mask


def pooled_tokens(request: TokenRequest, manifest: Manifest) -> Int64 | None:
    """Return 1 for each token with a part in a pooled vector, else 0: int64 (T,); None if all tokens have one.

    These are the real tokens, without the ignored ids of a static embedding model.
    """
    real = real_tokens(request, manifest)
    if manifest.sentence is None:
        return real
    for ignored in manifest.sentence.ignored_ids:
        if not (found := request.input_ids.values == ignored).any():
            continue
        known = (~found).astype(np.int64)
        real = known if real is None else real * known
    return None if real is None or real.all() else real


def count_real(request: TokenRequest, manifest: Manifest) -> Int64:
    """Return the number of real tokens of each row: int64 (B,)."""
    real = real_tokens(request, manifest)
    if real is None:
        return request.input_ids.lengths
    counts: Int64 = np.add.reduceat(real, request.input_ids.starts)
    return counts


def position_limit(request: TokenRequest, manifest: Manifest) -> int:
    """Return the largest legal offset + real tokens for the requested outputs."""
    wanted = manifest.rotary_of(request.outputs)
    return min([manifest.limit, *(rotary.max_len for rotary in wanted if rotary.max_len)])


def position_index(request: TokenRequest, manifest: Manifest, offset: Int64) -> Int64:
    """Return the position index of every token: int64 (T,); 0 for padding.

    `offset` is int64 (1,) or (B,). Padding is at 0 in `generate()` of transformers too.
    """
    rows, real = request.input_ids, real_tokens(request, manifest)
    if real is None:
        return rows.spread(offset) + np.arange(len(rows.values)) - rows.spread(rows.starts)
    before = np.cumsum(real) - real
    index: Int64 = (rows.spread(offset) + before - rows.spread(before[rows.starts])) * real
    return index


def next_positions(request: TokenRequest, manifest: Manifest) -> Int64:
    """Return the position after the largest of the real tokens of each row: int64 (B,); 0 without a real token."""
    assert request.position_ids is not None
    largest = np.maximum.reduce([rows.values for rows in (request.position_ids, *request.further_positions)])
    real = real_tokens(request, manifest)
    ends: Int64 = np.maximum.reduceat((largest + 1) * (1 if real is None else real), request.input_ids.starts)
    return ends


def graph_counts(request: TokenRequest, manifest: Manifest) -> bool:
    """Return whether the graph counts the positions of this request itself, with the result of `position_index`."""
    if request.position_ids is not None or request.input_ids.length is None:
        return False
    if manifest.counts == "mask" or request.attention_mask is None:
        return True
    if manifest.counts == "ids":  # the graph skips padding ids, and no others
        return bool((request.attention_mask.values[request.input_ids.values != manifest.padding_id] == 1).all())
    return real_tokens(request, manifest) is None
