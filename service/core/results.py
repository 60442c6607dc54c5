"""Results of the engine: tensors by name, buffered or chunked."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import PreblockError
from preblock.service.core.types import TENSOR_DTYPES, Int64, TokenRows


class GpuTarget(NamedTuple):
    """Memory of a GPU for the vectors of an output.

    Args:
        address: of the first byte.
        copy: copies bytes within the GPU; it takes their position in the output, their address and their number.

    """

    address: int
    copy: Callable[[int, int, int], None]


@dataclass
class OutputMemory:
    """Memory of a client for the vectors of an output, in place of memory of the server.

    Args:
        on_gpu: whether the model computes the vectors on a GPU; then `target` may be set, else `vectors`.
        vectors: float32 (T, width), set before the first chunk is computed; None leaves the vectors with the server.
        lost: returns the error for memory that has become shorter.
        target: set before the first chunk is computed; None leaves the vectors with the server.

    """

    on_gpu: bool = False
    vectors: NDArray[np.float32] | None = None
    lost: Callable[[], PreblockError] | None = None
    target: GpuTarget | None = None


class ChunkedTensor:
    """A tensor computed in chunks while it is sent. It can be read only once.

    Args:
        shape: of the tensor.
        dtype: a key of TENSOR_DTYPES.
        chunks: C-contiguous arrays of this dtype, in order.
        memory: receives the chunks once it is set; None if they are always computed in memory of the server.

    """

    size: ClassVar[int] = 0
    """Number of values in memory."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        chunks: Iterator[NDArray[np.generic]],
        memory: OutputMemory | None = None,
    ) -> None:
        self.shape = shape
        self.memory = memory
        self.dtype = TENSOR_DTYPES[dtype]
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.itemsize * math.prod(shape)
        self._chunks = chunks

    def __len__(self) -> int:
        """Size of the tensor in bytes."""
        return self.nbytes

    def __iter__(self) -> Iterator[NDArray[np.generic]]:
        """Compute the chunks."""
        return self._chunks


Tensor = NDArray[np.generic] | ChunkedTensor


@dataclass(eq=False, kw_only=True)
class Result:
    """The tensors of a response.

    Args:
        model: name of the model.
        version: its version.
        dtype: type of the request. Some outputs have another type.
        tensors: by output, C-contiguous; chunked only if the request allows it.
        lookup_use: use of the model's own lookup, in words; "" if no tensor is one.

    """

    model: str
    version: int
    dtype: str
    tensors: Mapping[str, Tensor]
    lookup_use: str = ""

    @property
    def size(self) -> int:
        """Number of values in memory."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The buffered tensors."""
        return {name: tensor for name, tensor in self.tensors.items() if not isinstance(tensor, ChunkedTensor)}


@dataclass(eq=False, kw_only=True)
class EmbedResult(Result):
    """The tensors of tokens.

    Their shape is (B, L, width) if all rows have the length L, (T, width) for ragged rows, and (B, width) with pooling.

    Args:
        lengths: int64 (B,), tokens of each row.
        next_offset: int64 (B,), the offset for the next tokens of each row.
        next_context: int64 (B, H), the ids before the next tokens of each row; None if no output depends on them.
        position_delta: int64 (B,), next position - `next_offset`; None without positions of three axes.
        truncated: int64 (B,), number of removed tokens of each row; None without `truncate`.
        input_ids: embedded ids; None unless requested.
        spans: int64 (T, 2), characters of each token, as in `Encoding`; None unless requested.

    """

    lengths: Int64
    next_offset: Int64
    next_context: Int64 | None = None
    position_delta: Int64 | None = None
    truncated: Int64 | None = None
    input_ids: TokenRows | None = None
    spans: Int64 | None = None

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return bool((self.lengths != self.lengths[0]).any())
