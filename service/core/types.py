"""Arrays with their meaning: the common form of requests and answers of every protocol.

Letters: B batch, T tokens of all rows, D output width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Output types, by their name in every protocol except the Open Inference Protocol."""


# The classes that every request makes are not frozen: a frozen one takes three times as long to make.
@dataclass(eq=False)
class TokenRows:
    """Rows of integers of any lengths, one after another.

    Args:
        values: int64 (T,), all rows.
        lengths: int64 (B,), the length of each; they sum to T.
        flat: they came as one list of values rather than as a list of rows; matters to messages only.
        numbers: int64 (B,), number of each row in messages; None for 0, 1, …

    """

    values: Int64
    lengths: Int64
    flat: bool = False
    numbers: Int64 | None = None

    @classmethod
    def of_array(cls, array: Int64) -> "TokenRows":
        """Return the rows of an int64 (B, L) array, or the one row of an (L,) array; a contiguous one is not copied."""
        batch, length = array.shape if array.ndim == 2 else (1, len(array))
        rows = cls(array.reshape(-1), _equal(batch, length), flat=array.ndim == 1)
        vars(rows)["length"] = length if batch else 0  # known here, so it need not be computed
        return rows

    @cached_property
    def length(self) -> int | None:
        """L where all rows have one length, else None."""
        first = int(self.lengths[0]) if len(self.lengths) else 0
        return first if (self.lengths == first).all() else None

    @cached_property
    def starts(self) -> Int64:
        """Return where each row begins in `values`: int64 (B,)."""
        ends: Int64 = np.cumsum(self.lengths)
        return ends - self.lengths

    def spread(self, per_row: Int64) -> Int64:
        """Repeat a value per row, (1,) or (B,), for each token: int64 (T,)."""
        return np.repeat(np.broadcast_to(per_row, self.lengths.shape), self.lengths)

    def kept(self, keep: Bools) -> "TokenRows":
        """Return the rows without the values where `keep`, bool (T,), is false; each has at least one before."""
        return TokenRows(self.values[keep], np.add.reduceat(keep, self.starts, dtype=np.int64), self.flat)

    def place(self, index: int) -> str:
        """Return where `values[index]` stands, as `[row][column]`, or `[column]` of a flat list."""
        if self.flat:
            return f"[{index}]"
        row = int(np.searchsorted(self.starts, index, side="right")) - 1
        return f"[{self.number(row)}][{index - int(self.starts[row])}]"

    def number(self, row: int) -> int:
        """Return the number of a row in messages."""
        return row if self.numbers is None else int(self.numbers[row])

    def columns(self, begin: int, end: int) -> "TokenRows":
        """Return the values from `begin` up to `end` of each row; shorter rows become empty."""
        lengths = np.clip(self.lengths, begin, end) - begin
        part = TokenRows(np.empty(0, np.int64), lengths, self.flat)
        index = part.spread(self.starts + begin - part.starts) + np.arange(int(lengths.sum()))
        return TokenRows(self.values[index], lengths, self.flat)


@lru_cache
def _equal(batch: int, length: int) -> Int64:
    """Return the lengths of rows of one length: int64 (B,), read-only."""
    lengths = np.full(batch, length, np.int64)
    lengths.flags.writeable = False
    return lengths


@dataclass(eq=False, kw_only=True)
class EmbedOptions:
    """The common options of requests of token ids and of text.

    Args:
        offset: int64 (1,) or (B,), the number of real tokens already fed; None for 0 or with `position_ids`.
        truncate: side on which a too long row is cut, "left" or "right"; None refuses it.
        pooling: of the vectors of a row: "none", or one vector, its "mean", "first" or "last".
        outputs: which tensors are wanted, by name; default `embeddings`.
        dtype: of the answer, a key of DTYPES.
        in_pieces: whether the answer may be computed in pieces, where it is large.
        whole: whether the answer is made whole even so, as a message of gRPC is.
        check: raises an PreblockError for values that the answer cannot hold; it sees all of those that are computed
            while they are sent before the first is. Default None: it holds any.

    """

    offset: Int64 | None = None
    truncate: str | None = None
    pooling: str = "none"
    outputs: tuple[str, ...] = ("embeddings",)
    dtype: str = "float32"
    in_pieces: bool = False
    whole: bool = False
    check: Callable[[NDArray[np.generic]], object] | None = None


@dataclass(frozen=True)
class SequenceRef:
    """The sequence of a request.

    Args:
        id: the client's name for it: 1 to 2^64 - 1, or text; 5 and "5" are two.
        start: it is the first of the sequence.
        end: it is the last.

    """

    id: int | str
    start: bool = False
    end: bool = False


@dataclass(eq=False, kw_only=True)
class TokenRequest(EmbedOptions):
    """Token ids and their other inputs, from any protocol.

    Args:
        input_ids: T ids in B rows.
        position_ids: position index of each token; excludes `offset`.
        attention_mask: 1 for a real token, 0 for padding, of the tokens sent; None where all are real.
        indices: further integers per token, by input, such as the segments `token_type_ids`; 0 where left out.
        special: bool (T,), the tokens that a tokenizer put around a text, which no cut takes; None without a text.
        spans: int64 (T, 2), as in `Encoding`; None where nobody asked.
        sequence: which running offsets it goes on from; None where it stands for itself.

    """

    input_ids: TokenRows
    position_ids: TokenRows | None = None
    attention_mask: TokenRows | None = None
    indices: Mapping[str, TokenRows] = field(default_factory=dict)
    special: Bools | None = None
    spans: Int64 | None = None
    sequence: SequenceRef | None = None


@dataclass(eq=False, kw_only=True)
class TextRequest(EmbedOptions):
    """Texts, one for each row; with `spans` the answer has the characters of each token."""

    text: tuple[str, ...]
    spans: bool = False


@dataclass(frozen=True)
class Encoding:
    """The tokens of texts.

    Args:
        input_ids: the ids, a row for each text.
        token_type_ids: the segment of each.
        special: bool (T,), whether the tokenizer put it around the text.
        spans: int64 (T, 2), the first character of the text that each stands for, and the one after the last; a special
            token stands for none. None where nobody asked.

    """

    input_ids: TokenRows
    token_type_ids: TokenRows
    special: Bools
    spans: Int64 | None


@dataclass(frozen=True, kw_only=True)
class PairwiseBiasRequest:
    """The queries and keys of a bias: Q queries from position `query_offset` on, and K keys from position 0 on.

    Args:
        query_length: Q.
        key_length: K.
        query_offset: number of keys before the first query; None where it is left out.
        dtype: of the answer, a key of DTYPES.

    """

    query_length: int
    key_length: int
    query_offset: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class StemRequest:
    """An image or a spectrogram for each row.

    Args:
        input: name of the tensor.
        values: float32, (B, …).
        dtype: of the answer, a key of DTYPES.

    """

    input: str
    values: NDArray[np.float32]
    dtype: str = "float32"


AnyRequest = TokenRequest | PairwiseBiasRequest | StemRequest
