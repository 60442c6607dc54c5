"""The rule for plain calls: requests of token ids and offsets alone, legal and within every limit.

Nearly all requests are plain. The fast path answers no others. The general path checks plain requests no further, and
reports why another one is not allowed. `is_plain` has every rule about values, and `find_excess` the limits of their
number.

Letters: B batch, L length, T tokens of all rows, H ids of a history.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import NGRAM_ROW_IDS, NGRAM_SCALES, STORED
from preblock.service.core.errors import TooLarge
from preblock.service.core.settings import RequestLimits
from preblock.service.core.types import FLOAT32_BYTES, Int64, TokenRequest, TokenRows
from preblock.service.engine.positions import pooled_tokens
from preblock.service.engine.vectors import POOLINGS, has_dtype

ZERO = np.zeros(1, np.int64)
ZERO.flags.writeable = False
"""Offset of a request without one. It cannot be written, because all of them share it."""


@dataclass(eq=False, slots=True)
class Call:
    """A request of token ids, each real, and of offsets, from any protocol.

    Args:
        ids: int64 (T,) or (B, L).
        rows: B, each row of at least one token.
        longest: most tokens of a row.
        offset: int64 (1,) or (B,).
        context: int64 (B, H), the ids before each row; None without one.
        indices: further integers, with the lengths of the ids; None or empty without them.
        pooled: int64 (T,), as from `pooled_tokens`; None if all tokens have a part in a vector, or without pooling.
        size: bytes of the message; 0 if its transport has checked it.
        request: the request; None if it has no options beside those of its fast path.

    """

    ids: Int64
    rows: int
    longest: int
    offset: Int64
    context: Int64 | None = None
    indices: Mapping[str, TokenRows] | None = None
    pooled: Int64 | None = None
    size: int = 0
    request: TokenRequest | None = None

    @classmethod
    def of(cls, request: TokenRequest, manifest: Manifest, size: int = 0) -> "Call | None":
        """Return the call of a request; None for a request with another input or option, or with an empty row."""
        rows, context = request.input_ids, request.context
        if request.attention_mask is not None or request.position_ids is not None or request.truncate is not None:
            return None
        longest = rows.length
        if longest is None:
            longest = int(rows.lengths.max()) if rows.lengths.all() else 0
        if not longest or (context is not None and not context.length):
            return None
        if request.indices and not all(np.array_equal(a.lengths, rows.lengths) for a in request.indices.values()):
            return None
        return cls(
            rows.values,
            len(rows.lengths),
            longest,
            ZERO if request.offset is None else request.offset,
            None if context is None else context.values.reshape(len(context.lengths), -1),
            request.indices,
            None if request.pooling == "none" else pooled_tokens(request, manifest),
            size,
            request,
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The legal values of plain calls to a model.

    Args:
        vocab_size: legal ids are below.
        limit: largest legal offset + tokens of a row.
        indices: number of legal values of each further input.
        needed: required ones of these inputs.
        history: H; 0 for a model without one.
        needs_context: whether an output depends on the context.

    """

    vocab_size: int
    limit: int
    indices: Mapping[str, int]
    needed: tuple[str, ...]
    history: int
    needs_context: bool


def bounds_of(manifest: Manifest, outputs: tuple[str, ...], dtype: str, pooling: str) -> Bounds | None:
    """Return the bounds for these outputs and options; None if the options are not legal, or need further checks."""
    legal = pooling in POOLINGS and manifest.widths.keys() >= set(outputs) and has_dtype(dtype, outputs, manifest)
    return _bounds_of(manifest, outputs, dtype, pooling) if legal else None  # other names may take megabytes


@lru_cache
def _bounds_of(manifest: Manifest, outputs: tuple[str, ...], dtype: str, pooling: str) -> Bounds | None:
    vectors = pooling == "none" or (dtype != STORED and {NGRAM_ROW_IDS, NGRAM_SCALES}.isdisjoint(outputs))
    if not vectors or manifest.counts == "ids" or manifest.refused_ids or manifest.rotary_of(outputs):
        return None
    return Bounds(
        manifest.vocab_size,
        manifest.limit,
        manifest.indices,
        manifest.needed,
        0 if manifest.history is None else manifest.history.tokens,
        manifest.needs_history(outputs),
    )


def is_plain(call: Call, bounds: Bounds, limits: RequestLimits, values: int = 0) -> bool:
    """Return whether a call is legal and within every limit.

    Args:
        call: the call.
        bounds: legal values of its model and its outputs.
        limits: of requests.
        values: values of its response that are in memory at once; 0 if the caller checks them.

    """
    ids, rows, offset, context = call.ids, call.rows, call.offset, call.context
    vocab_size, room = bounds.vocab_size, bounds.limit - call.longest
    if (
        room < 0
        or (context is None and bounds.needs_context)
        or (len(offset) != 1 and len(offset) != rows)
        or find_excess(limits, ids.size, rows, values) is not None
        or call.size > limits.body_bytes
        or not (0 <= ids.item() < vocab_size if ids.size == 1 else _is_below(ids, vocab_size))
        or not (0 <= offset.item() <= room if len(offset) == 1 else _is_below(offset, room + 1))
    ):
        return False
    if context is not None and not (
        bounds.history and context.shape == (rows, bounds.history) and _is_below(context, vocab_size)
    ):
        return False
    if (call.indices or bounds.needed) and not _has_legal_indices(call.indices or {}, bounds):
        return False
    return call.pooled is None or _has_token_in_each_row(call)


def find_excess(
    limits: RequestLimits, tokens: int, rows: int, values: int, field: str = "input_ids"
) -> TooLarge | None:
    """Return the error of a request with too many tokens, rows or buffered values; None within every limit.

    `field` is its name for the client.
    """
    if tokens > limits.tokens:
        return TooLarge(field, f"{tokens} tokens", f"at most {limits.tokens} tokens in a request")
    if rows > limits.rows:
        return TooLarge(field, f"{rows} rows", f"at most {limits.rows} rows in a request")
    if FLOAT32_BYTES * values > limits.buffered_bytes:
        allowed = f"at most {limits.buffered_bytes} in a buffered response"
        return TooLarge(field, f"{FLOAT32_BYTES * values} bytes of vectors", allowed)
    return None


def check_size(limits: RequestLimits, field: str, *, tokens: int = 0, rows: int = 0, values: int = 0) -> None:
    """Raise TooLarge if a request has too many tokens, rows or buffered values."""
    if (error := find_excess(limits, tokens, rows, values, field)) is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and such a cycle would keep the request


def _is_below(values: Int64, limit: int) -> bool:
    """Return whether all values are in 0 to `limit` - 1.

    As unsigned numbers, negative values are larger than any limit, so that one pass checks both ends.
    """
    return bool(np.maximum.reduce(values.view(np.uint64), axis=None, initial=0) < limit)


def _has_legal_indices(indices: Mapping[str, TokenRows], bounds: Bounds) -> bool:
    legal = bounds.indices
    return indices.keys() >= set(bounds.needed) and all(
        name in legal and _is_below(rows.values, legal[name]) for name, rows in indices.items()
    )


def _has_token_in_each_row(call: Call) -> bool:
    assert call.pooled is not None
    assert call.request is not None
    return bool(np.add.reduceat(call.pooled, call.request.input_ids.starts).all())
