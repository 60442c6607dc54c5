"""The results of a client. Letters: B rows, L tokens of a row, T tokens of all rows, D width of a vector."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from preblock.client.errors import needed

if TYPE_CHECKING:
    import torch

Int64 = NDArray[np.int64]
Vectors = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The vectors of some rows of tokens.

    Args:
        model: name of the model.
        version: its version.
        vectors: (B, L, D) if all rows have one length, else (T, D), the rows one after another.
        lengths: int64 (B,), tokens of each row.
        next_offset: int64 (B,), the offset to continue each row with.
        truncated: int64 (B,), tokens cut of each row; None without `truncate`.
        input_ids: the ids of each row of text, with `return_tokens`.
        spans: for each row of text int64 (L, 2), the first character of each token and the one after its last, with
            `return_tokens`.

    """

    model: str
    version: int
    vectors: Vectors
    lengths: Int64
    next_offset: Int64
    truncated: Int64 | None = None
    input_ids: list[Int64] | None = None
    spans: list[Int64] | None = None

    def rows(self) -> list[Vectors]:
        """Return the vectors of each row, (L, D), without a copy."""
        if self.vectors.ndim == 3:
            return list(self.vectors)
        return np.split(self.vectors, np.cumsum(self.lengths)[:-1])

    def to_torch(self) -> "torch.Tensor":
        """Return `vectors` as a tensor of the same memory."""
        import torch

        if self.vectors.dtype.name == "bfloat16":  # torch does not take this type from numpy
            return torch.from_numpy(self.vectors.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(self.vectors)


@dataclass(frozen=True)
class Model:
    """A served model.

    Args:
        name: name of the model.
        version: the described version.
        versions: all served versions.
        provider: the onnxruntime provider in use.
        max_len: the largest legal offset + real tokens; None without a limit.
        max_tokens: most tokens of one request.
        manifest: manifest of the artifact.
        parity: parity report of the artifact.

    """

    name: str
    version: int
    versions: list[int]
    provider: str
    max_len: int | None
    max_tokens: int
    manifest: dict[str, Any]
    parity: dict[str, Any]


def array_of(data: bytearray | memoryview, dtype: str, shape: list[int]) -> Vectors:
    """Return little-endian bytes as a writable array of the same memory."""
    if dtype == "bfloat16":
        with needed("bfloat16", "ml_dtypes"):
            import ml_dtypes

        return np.frombuffer(data, ml_dtypes.bfloat16).reshape(shape)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)
