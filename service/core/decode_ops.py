"""The operations of a decode stream, and their effects on the offsets of its rows. Each message has one operation.

Letters: R rows of the stream, T tokens of a step.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from preblock.service.core.errors import Conflict, Invalid, TooLarge
from preblock.service.core.types import Int64, PartsRequest, TokenRequest, TokenRows, per_row


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """The options of a stream.

    Args:
        offset: int64 (1,) or (R,), number of real tokens already fed of each row. At most max_len: such a row is full.
        rows: R.
        context: the last ids before each row, R rows of them; None without earlier tokens.
        outputs: names of the tensors in the response to a step.
        dtype: a key of DTYPES.
        special_tokens_in_text: one of `SPECIAL_TOKENS_IN_TEXT`, for the texts of parts.

    """

    offset: Int64
    rows: int = 1
    context: TokenRows | None = None
    outputs: tuple[str, ...] = ("embeddings",)
    dtype: str = "float32"
    special_tokens_in_text: str = "allow"


@dataclass(frozen=True)
class RowsOp:
    """An operation without tokens.

    Args:
        values: int64, the integers of the operation; empty if it has none.
        context: the last ids before each appended row; None without earlier tokens, and for other operations.

    """

    name: ClassVar[str]
    values: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    context: TokenRows | None = None


class RewindOp(RowsOp):
    """Go back to earlier offsets; `values` are offsets, (1,) or (R,)."""

    name = "rewind"


class ReorderOp(RowsOp):
    """Continue row i from the offset of row `values[i]`, as in beam search. Rows may be dropped or repeated."""

    name = "reorder"


class AppendOp(RowsOp):
    """Add rows after the others; `values` are their offsets."""

    name = "append"


class DropOp(RowsOp):
    """End the rows `values`. Later rows move up. All rows may end."""

    name = "drop"


class PingOp(RowsOp):
    """Do nothing; the message gets an answer."""

    name = "ping"


class CloseOp(RowsOp):
    """End the stream."""

    name = "close"


INTEGER_OPS: dict[str, type[RowsOp]] = {kind.name: kind for kind in (RewindOp, ReorderOp, AppendOp, DropOp)}
"""Operations with a list of integers, by name."""
BARE_OPS: dict[str, type[RowsOp]] = {kind.name: kind for kind in (PingOp, CloseOp)}
"""Operations without arguments, by name."""

STEP = "step"
Step = TokenRequest | PartsRequest
"""The next tokens of R rows; some rows may be empty, but not all. `offset` is the one that the client expects."""
Operation = Step | RowsOp


class RunningRows(NamedTuple):
    """The state of all rows, to resume a stream.

    Args:
        offset: int64 (R,).
        context: int64 (R, H), the ids before the next token of each row; None if no output depends on them.

    """

    offset: Int64
    context: Int64 | None = None

    @property
    def history(self) -> int:
        """H, the number of ids of a context; 0 without contexts."""
        return 0 if self.context is None else self.context.shape[1]


@dataclass(frozen=True)
class DecodeMessage:
    """An operation, with its number and digest to detect a repetition.

    Args:
        operation: of the message.
        number: ascending number from the client; 0 without one.
        digest: of the bytes of the message; empty without a number.

    """

    operation: Operation
    number: int = 0
    digest: bytes = b""


def offsets_after(operation: RowsOp, running: Int64, limit: int, max_rows: int) -> Int64:
    """Return the offsets of the rows after an operation.

    Args:
        operation: the operation.
        running: int64 (R,), offsets before it.
        limit: maximum offset.
        max_rows: maximum rows of the stream.

    Raises:
        Invalid: a row does not exist, an offset is out of range, or the number of offsets is wrong.
        TooLarge: the stream would have more than `max_rows` rows.

    """
    values, name, count = operation.values, operation.name, len(running)
    match operation:
        case RewindOp():
            offset = per_row(name, values, count)
            check_each(name, offset, running)
            return offset
        case ReorderOp():
            _check_rows(name, values, count)
            check_count(name, len(values), max_rows)
            moved: Int64 = running[values]
            return moved
        case AppendOp():
            check_count(name, count + len(values), max_rows)
            check_each(name, values, np.full(len(values), limit))
            return np.concatenate([running, values])
        case DropOp():
            _check_rows(name, values, count)
            return np.delete(running, values)
    return running


def check_each(field: str, offset: Int64, limits: Int64) -> None:
    """Check that each offset is 0 to its limit.

    Raises:
        Invalid: an offset is out of range; the error names the first one.

    """
    wrong = np.flatnonzero((offset < 0) | (offset > limits))
    if len(wrong):
        row = int(wrong[0])
        name = f"{field}[{row}]" if len(offset) > 1 else field
        raise Invalid(name, int(offset[row]), f"0 to {int(limits[row])}", items=wrong)


def check_stated(stated: Int64, running: Int64) -> None:
    """Check the offsets expected by the client.

    Raises:
        Conflict: the rows have other offsets.

    """
    offset = per_row("offset", stated, len(running))
    wrong = np.flatnonzero(offset != running)
    if len(wrong):
        row = int(wrong[0])
        expected = f"{int(running[row])}, the offset of this row"
        raise Conflict(f"offset[{row}]", int(offset[row]), expected, items=wrong)


def _check_rows(field: str, rows: Int64, count: int) -> None:
    wrong = np.flatnonzero((rows < 0) | (rows >= count))
    if len(wrong):
        index = int(wrong[0])
        allowed = f"0 to {count - 1}" if count else "nothing, since the stream has no rows"
        raise Invalid(f"{field}[{index}]", int(rows[index]), allowed, items=wrong)


def check_count(field: str, rows: int, max_rows: int) -> None:
    """Check that a stream has at most `max_rows` rows.

    Raises:
        TooLarge: it would have more.

    """
    if rows > max_rows:
        raise TooLarge(field, f"{rows} rows", f"at most {max_rows} rows of a stream")
