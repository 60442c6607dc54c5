"""Arrays with their meaning: what every door turns a request into, and what it makes an answer of.

Letters: B batch, T tokens of all rows, D output width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

DTYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Output types, by the name that every door but the Open Inference Protocol uses."""


@dataclass(frozen=True)
class Rows:
    """Rows of integers, which may differ in length, laid one after another.

    Args:
        values: int64 (T,), all rows.
        lengths: int64 (B,), the length of each; they sum to T.
        flat: they came as one list of values rather than as a list of rows; matters to messages only.

    """

    values: Int64
    lengths: Int64
    flat: bool = False

    @classmethod
    def of_array(cls, array: Int64) -> "Rows":
        """Return the rows of an int64 (B, L) array, without a copy of a contiguous one."""
        batch, length = array.shape
        return cls(array.reshape(-1), np.full(batch, length, np.int64))

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

    def place(self, index: int) -> str:
        """Return where `values[index]` stands, as `[row][column]`, or `[column]` of a flat list."""
        if self.flat:
            return f"[{index}]"
        row = int(np.searchsorted(self.starts, index, side="right")) - 1
        return f"[{row}][{index - int(self.starts[row])}]"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Token ids and what belongs to them, whichever door they came through.

    Args:
        input_ids: T ids in B rows.
        offset: int64 (1,) or (B,), the number of real tokens already fed; None for 0 or with `position_ids`.
        position_ids: position index of each token; excludes `offset`.
        attention_mask: 1 for a real token, 0 for padding, of the tokens sent; None where all are real.
        indices: further integers per token, by input, such as the segments `token_type_ids`; 0 where left out.
        outputs: which tensors are wanted, by name; default `embeddings`.
        dtype: of the answer, a key of DTYPES.

    """

    input_ids: Rows
    offset: Int64 | None = None
    position_ids: Rows | None = None
    attention_mask: Rows | None = None
    indices: Mapping[str, Rows] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("embeddings",)
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class BiasRequest:
    """Which queries meet which keys: Q queries from position `query_offset` on, and K keys from position 0 on.

    Args:
        query_length: Q.
        key_length: K.
        query_offset: keys that were fed before the first query; None where it is left out.
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


AnyRequest = Request | BiasRequest | StemRequest


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The tensors that were asked for.

    Args:
        model: name of the model that answered.
        version: its version.
        dtype: a key of DTYPES.
        tensors: by output, in that type, C-contiguous.

    """

    model: str
    version: int
    dtype: str
    tensors: Mapping[str, NDArray[np.generic]]

    @property
    def size(self) -> int:
        """How many values it holds."""
        return sum(tensor.size for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True)
class TokenAnswer(Answer):
    """The tensors of tokens: (B, L, width) where all rows have one length, else (T, width), the rows one after another.

    Args:
        lengths: int64 (B,), tokens of each row.
        next_offset: int64 (B,), the offset that continues each row.

    """

    lengths: Int64
    next_offset: Int64

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return bool((self.lengths != self.lengths[0]).any())
