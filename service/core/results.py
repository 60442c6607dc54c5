"""Results of the engine: tensors by name, whole or in chunks."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.types import DTYPES, Int64, TokenRows


class ChunkedTensor:
    """A tensor with values computed while they are sent, once, piece by piece.

    Args:
        shape: of the whole.
        dtype: a key of DTYPES.
        pieces: in that type, C-contiguous, one after another.

    """

    size: ClassVar[int] = 0
    """Values that it holds now."""

    def __init__(self, shape: tuple[int, ...], dtype: str, pieces: Iterator[NDArray[np.generic]]) -> None:
        self.shape = shape
        self.dtype = DTYPES[dtype]
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.itemsize * math.prod(shape)
        self._pieces = pieces

    def __len__(self) -> int:
        """Bytes of the whole."""
        return self.nbytes

    def __iter__(self) -> Iterator[NDArray[np.generic]]:
        """Compute the pieces."""
        return self._pieces


Tensor = NDArray[np.generic] | ChunkedTensor


@dataclass(eq=False, kw_only=True)
class Result:
    """The tensors of an answer.

    Args:
        model: name of the model.
        version: its version.
        dtype: a key of DTYPES.
        tensors: by output, in that type, C-contiguous; in pieces only where the request allowed it.

    """

    model: str
    version: int
    dtype: str
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """How many values it holds."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The tensors, for a request without pieces."""
        return {name: tensor for name, tensor in self.tensors.items() if not isinstance(tensor, ChunkedTensor)}


@dataclass(eq=False, kw_only=True)
class EmbedResult(Result):
    """The tensors of tokens: (B, L, width) where all rows have one length, else (T, width), the rows one after another.

    Where each row was pooled they are (B, width).

    Args:
        lengths: int64 (B,), tokens of each row.
        next_offset: int64 (B,), the offset that continues each row.
        truncated: int64 (B,), number of cut tokens of each row; None without `truncate`.
        input_ids: what was embedded; None where the request had no `spans`.
        spans: int64 (T, 2), which characters each token stands for; None where nobody asked.

    """

    lengths: Int64
    next_offset: Int64
    truncated: Int64 | None = None
    input_ids: TokenRows | None = None
    spans: Int64 | None = None

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return bool((self.lengths != self.lengths[0]).any())
