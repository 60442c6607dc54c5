"""History: the ids before each token, for outputs that depend on them.

The history of a token is the last real tokens before it in its row, and the `context` of the request before these.
Padding is never part of it.

Letters: B batch, T tokens of all rows, H ids of a history.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from preblock.service.artifacts.manifest import History, Manifest
from preblock.service.core.decode_ops import AppendOp, DropOp, ReorderOp, RewindOp, RowsOp
from preblock.service.core.errors import Invalid
from preblock.service.core.types import Bools, Int64, TokenRequest, TokenRows
from preblock.service.engine.positions import count_real, real_tokens

MAX_KEPT_IDS = 2**12
"""Most tokens of a row in a decode stream that a rewind may go back: 32 kB."""
MAX_STREAM_IDS = 2**18
"""Most such tokens of all rows of a stream: 2 MB."""


def context_of(request: TokenRequest, manifest: Manifest) -> Int64:
    """Return the ids before each row of a validated request, int64 (B, H)."""
    assert manifest.history is not None
    shape = len(request.input_ids.lengths), manifest.history.tokens
    if request.context is not None:
        return request.context.values.reshape(shape)
    return np.full(shape, manifest.history.reset_id)


def token_contexts(request: TokenRequest, manifest: Manifest) -> Int64:
    """Return the ids before each token of a validated request, int64 (T, H); arbitrary for padding."""
    assert manifest.history is not None
    real = real_tokens(request, manifest)
    ids, index, _ = _joined(request, manifest)
    found: Int64 = ids[index[:, None] + np.arange(-manifest.history.tokens, 0)]
    if real is None:
        return found
    contexts = np.full((len(real), manifest.history.tokens), manifest.history.reset_id)
    contexts[real != 0] = found
    return contexts


def next_context(request: TokenRequest, manifest: Manifest) -> Int64 | None:
    """Return the ids before the next tokens of each row, int64 (B, H); None for a request without use for them."""
    assert manifest.history is not None
    if request.context is None and not manifest.needs_history(request.outputs):
        return None
    if request.input_ids.length and real_tokens(request, manifest) is None:  # joining the rows would take longer
        rows = request.input_ids.values.reshape(-1, request.input_ids.length)
        latest: Int64 = np.concatenate((context_of(request, manifest), rows), axis=1)[:, -manifest.history.tokens :]
        return np.ascontiguousarray(latest)
    ids, _, ends = _joined(request, manifest)
    found: Int64 = ids[ends[:, None] + np.arange(-manifest.history.tokens, 0)]
    return found


def _joined(request: TokenRequest, manifest: Manifest) -> tuple[Int64, Int64, Int64]:
    """Return contexts and real tokens in one array, row by row; the places of these tokens; and the end of each row."""
    context, real = context_of(request, manifest), real_tokens(request, manifest)
    counts, width = count_real(request, manifest), context.shape[1]
    values = request.input_ids.values if real is None else request.input_ids.values[real != 0]
    before = np.arange(1, len(counts) + 1) * width  # ids of contexts up to each row
    ends: Int64 = np.cumsum(counts) + before
    index = np.arange(len(values)) + np.repeat(before, counts)
    ids = np.empty(len(values) + context.size, np.int64)
    ids[index] = values
    ids[(ends - counts)[:, None] + np.arange(-width, 0)] = context
    return ids, index, ends


@dataclass(frozen=True)
class RowHistories:
    """The last ids of each row of a decode stream, for outputs that depend on them. It never changes.

    Args:
        history: their number for a token, and the id before the first token.
        tails: the last ids of each row, at least as many as a token needs; the others allow a rewind.

    """

    history: History
    tails: tuple[Int64, ...]

    @classmethod
    def start(cls, history: History, rows: int, context: TokenRows | None) -> "RowHistories":
        """Return the histories of new rows after a validated `context`; None for rows without earlier tokens."""
        if context is None:
            return cls(history, (np.full(history.tokens, history.reset_id),) * rows)
        return cls(history, tuple(context.values.reshape(rows, history.tokens)))

    @cached_property
    def context(self) -> Int64:
        """The ids before the next token of each row, int64 (R, H)."""
        if not self.tails:
            return np.empty((0, self.history.tokens), np.int64)
        tokens = self.history.tokens
        return np.concatenate([tail[-tokens:] for tail in self.tails]).reshape(-1, tokens)

    def new_rows(self, offset: Int64) -> Bools:
        """Return which rows have no earlier tokens, given the offset of each, int64 (R,): bool (R,)."""
        blank: Bools = (offset == 0) & (self.context == self.history.reset_id).all(axis=1)
        return blank

    def fed(self, step: TokenRequest) -> "RowHistories":
        """Return the histories after the tokens of a valid step. Explicit positions allow no rewind into the past."""
        rows = []
        for start, length in zip(step.input_ids.starts, step.input_ids.lengths, strict=True):
            ids = step.input_ids.values[start : start + length]
            if step.attention_mask is not None:
                ids = ids[step.attention_mask.values[start : start + length] != 0]
            rows.append(ids)
        return self.extended(rows, step.position_ids is None)

    def extended(self, rows: Iterable[Int64], rewindable: bool = True) -> "RowHistories":
        """Return the histories after more ids of each row; a rewind may go back if `rewindable` is true."""
        room = min(MAX_KEPT_IDS, MAX_STREAM_IDS // max(1, len(self.tails)))
        kept = self.history.tokens + (room if rewindable else 0)
        tails = [np.concatenate((tail, ids))[-kept:] for tail, ids in zip(self.tails, rows, strict=True)]
        return RowHistories(self.history, tuple(tails))

    def moved(self, operation: RowsOp, before: Int64, after: Int64) -> "RowHistories":
        """Return the histories after a valid operation that took the offsets of the rows from `before` to `after`.

        Raises:
            Invalid: a rewind goes back to unknown ids, or `append` has no context.

        """
        values = operation.values
        match operation:
            case RewindOp():
                return replace(self, tails=tuple(map(self._rewound, range(len(after)), before, after)))
            case ReorderOp():
                return replace(self, tails=tuple(self.tails[row] for row in values))
            case AppendOp():
                new = RowHistories.start(self.history, len(values), operation.context)
                return replace(self, tails=self.tails + new.tails)
            case DropOp():
                dropped = set(values.tolist())
                return replace(self, tails=tuple(tail for row, tail in enumerate(self.tails) if row not in dropped))
        return self

    def _rewound(self, row: int, before: int, after: int) -> Int64:
        tail, history = self.tails[row], self.history
        back = int(before - after)
        if after == 0 and back:
            return np.full(history.tokens, history.reset_id)
        known = len(tail) - history.tokens
        if back > known:
            allowed = f"{before - known} to {before}, or 0: the ids before are unknown; open a stream with context"
            raise Invalid(f"rewind[{row}]", int(after), allowed)
        return tail[: len(tail) - back]
