"""The operations of a decode stream, one in each message, and their effects on the offsets of the rows.

Letters: R rows of the stream, T tokens of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from preblock.service.core.errors import Conflict, Invalid, TooLarge
from preblock.service.core.types import Int64, TokenRows


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """The options of a stream.

    Args:
        offset: int64 (1,) or (R,), real tokens already fed of each row; it may be max_len, where nothing fits any more.
        rows: R.
        outputs: tensors in the answer to a step.
        dtype: a key of DTYPES.

    """

    offset: Int64
    rows: int = 1
    outputs: tuple[str, ...] = ("embeddings",)
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class StepOp:
    """The next tokens.

    Args:
        input_ids: T ids in R rows; a row may be empty, but not all.
        offset: int64 (1,) or (R,), where the client takes the rows to be; None where it does not say.
        position_ids: position index of each token; None for those that follow from the running offsets.
        attention_mask: 1 for a real token, 0 for padding; None where all are real.
        indices: further integers per token, by input.

    """

    name: ClassVar[str] = "step"
    input_ids: TokenRows
    offset: Int64 | None = None
    position_ids: TokenRows | None = None
    attention_mask: TokenRows | None = None
    indices: Mapping[str, TokenRows] = field(default_factory=dict)

    def columns(self, begin: int, end: int) -> "StepOp":
        """Return of each row the tokens from `begin` up to `end`, without an offset."""
        position, mask = self.position_ids, self.attention_mask
        return StepOp(
            input_ids=self.input_ids.columns(begin, end),
            position_ids=None if position is None else position.columns(begin, end),
            attention_mask=None if mask is None else mask.columns(begin, end),
            indices={name: rows.columns(begin, end) for name, rows in self.indices.items()},
        )


@dataclass(frozen=True)
class RewindOp:
    """Go back; `offset` is int64 (1,) or (R,)."""

    name: ClassVar[str] = "rewind"
    offset: Int64

    def after(self, running: Int64, limit: int, most: int) -> Int64:  # noqa: ARG002 - one signature for all
        """Return the offsets of the rows afterwards.

        Raises:
            Invalid: an offset beyond the running one, or another number of them.

        """
        offset = per_row("rewind", self.offset, len(running))
        check_each("rewind", offset, running)
        return offset


@dataclass(frozen=True)
class ReorderOp:
    """Row i goes on from where row `rows[i]` is, as in beam search: rows may be dropped and stand several times."""

    name: ClassVar[str] = "reorder"
    rows: Int64

    def after(self, running: Int64, limit: int, most: int) -> Int64:  # noqa: ARG002 - one signature for all
        """Return the offsets of the rows afterwards.

        Raises:
            Invalid: no such row.
            TooLarge: more than `most` rows.

        """
        _check_rows("reorder", self.rows, len(running))
        check_count("reorder", len(self.rows), most)
        moved: Int64 = running[self.rows]
        return moved


@dataclass(frozen=True)
class AppendOp:
    """Further rows, after the others; `offset` is int64, one for each of them."""

    name: ClassVar[str] = "append"
    offset: Int64

    def after(self, running: Int64, limit: int, most: int) -> Int64:
        """Return the offsets of the rows afterwards.

        Raises:
            Invalid: an offset beyond `limit`.
            TooLarge: more than `most` rows.

        """
        check_count("append", len(running) + len(self.offset), most)
        check_each("append", self.offset, np.full(len(self.offset), limit))
        return np.concatenate([running, self.offset])


@dataclass(frozen=True)
class DropOp:
    """Rows end; those after them move up. All may end."""

    name: ClassVar[str] = "drop"
    rows: Int64

    def after(self, running: Int64, limit: int, most: int) -> Int64:  # noqa: ARG002 - one signature for all
        """Return the offsets of the rows afterwards.

        Raises:
            Invalid: no such row.

        """
        _check_rows("drop", self.rows, len(running))
        return np.delete(running, self.rows)


@dataclass(frozen=True)
class PingOp:
    """No operation; it has an answer."""

    name: ClassVar[str] = "ping"

    def after(self, running: Int64, limit: int, most: int) -> Int64:  # noqa: ARG002 - one signature for all
        """Return the offsets of the rows as they are."""
        return running


@dataclass(frozen=True)
class CloseOp:
    """The end of the stream."""

    name: ClassVar[str] = "close"


OF_INTEGERS: dict[str, type[RewindOp | ReorderOp | AppendOp | DropOp]] = {
    kind.name: kind for kind in (RewindOp, ReorderOp, AppendOp, DropOp)
}
OF_NOTHING: dict[str, type[PingOp | CloseOp]] = {kind.name: kind for kind in (PingOp, CloseOp)}
"""Operations by name: those that are a list of integers, and those that say nothing further."""

Operation = StepOp | RewindOp | ReorderOp | AppendOp | DropOp | PingOp | CloseOp


@dataclass(frozen=True)
class DecodeMessage:
    """An operation, with its number and digest: they show a repetition.

    Args:
        operation: of the message.
        number: the client's, ascending; 0 for none.
        digest: of the bytes of the message; empty without a number.

    """

    operation: Operation
    number: int = 0
    digest: bytes = b""


def per_row(field: str, offset: Int64, rows: int) -> Int64:
    """Return an offset for each of `rows` rows.

    Raises:
        Invalid: neither one value nor one for each row.

    """
    if len(offset) not in (1, rows):
        raise Invalid(field, f"{len(offset)} values", f"one value, or one for each of {rows} rows")
    return np.broadcast_to(offset, rows).copy()


def check_each(field: str, offset: Int64, limits: Int64) -> None:
    """Check that each offset is 0 to its limit.

    Raises:
        Invalid: the first that is not.

    """
    wrong = np.flatnonzero((offset < 0) | (offset > limits))
    if len(wrong):
        row = int(wrong[0])
        raise Invalid(f"{field}[{row}]" if len(offset) > 1 else field, int(offset[row]), f"0 to {int(limits[row])}")


def check_stated(stated: Int64, running: Int64) -> None:
    """Check where the client takes the rows to be.

    Raises:
        Conflict: they are elsewhere.

    """
    offset = per_row("offset", stated, len(running))
    wrong = np.flatnonzero(offset != running)
    if len(wrong):
        row = int(wrong[0])
        raise Conflict(f"offset[{row}]", int(offset[row]), f"{int(running[row])}, where this row is")


def _check_rows(field: str, rows: Int64, count: int) -> None:
    wrong = np.flatnonzero((rows < 0) | (rows >= count))
    if len(wrong):
        index = int(wrong[0])
        allowed = f"0 to {count - 1}" if count else "nothing, since the stream has no rows"
        raise Invalid(f"{field}[{index}]", int(rows[index]), allowed)


def check_count(field: str, rows: int, most: int) -> None:
    """Check that a stream has at most `most` rows.

    Raises:
        TooLarge: it would have more.

    """
    if rows > most:
        raise TooLarge(field, f"{rows} rows", f"at most {most} rows of a stream")
