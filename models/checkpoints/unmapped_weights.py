"""Reads a safetensors file larger than the memory: Linux refuses the writable mapping of the whole file by torch."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from preblock.models.checkpoints.weight_files import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class UnmappedWeights:
    """A file with the methods of `safe_open`; each tensor is copied, when it is read.

    Args:
        file: of the weights; the safetensors library has checked its header.

    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            self._header = json.loads(stream.read(length))
        self._begin = 8 + length

    def __enter__(self) -> "UnmappedWeights":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(key for key in self._header if key != "__metadata__")

    def get_tensor(self, key: str) -> Tensor:
        """Return a tensor in its stored type.

        Raises:
            CheckpointError: there is no such tensor, or its type is not supported.

        """
        dtype, shape = self.describe(key)
        return self.read(key, 0, math.prod(shape) * dtype.itemsize)

    def get_slice(self, key: str) -> "Rows":
        """Return a tensor to be read by rows; raise CheckpointError as `get_tensor` does."""
        return Rows(self, key)

    def describe(self, key: str) -> tuple[torch.dtype, list[int]]:
        """Return type and shape of a tensor; raise CheckpointError as `get_tensor` does."""
        if key not in self.keys():
            raise CheckpointError(f"{self._file}: no tensor {key}")
        dtype = self._header[key]["dtype"]
        if dtype not in DTYPES:
            raise CheckpointError(f"{self._file}: tensor {key} is {dtype}, expected {', '.join(DTYPES)}")
        return DTYPES[dtype], self._header[key]["shape"]

    def read(self, key: str, begin: int, count: int) -> Tensor:
        """Return `count` bytes of a tensor from byte `begin`, whole rows, in its stored type."""
        dtype, shape = self.describe(key)
        offset = self._begin + self._header[key]["data_offsets"][0] + begin
        content = torch.from_numpy(np.fromfile(self._file, np.uint8, count, offset=offset)).view(dtype)
        return content.reshape(-1, *shape[1:]) if shape else content.reshape(())


class Rows:
    """The rows of a tensor; a slice of them is read from the file."""

    def __init__(self, weights: UnmappedWeights, key: str) -> None:
        self._weights, self._key = weights, key
        dtype, shape = weights.describe(key)
        self._count, self._row_bytes = shape[0], math.prod(shape[1:]) * dtype.itemsize

    def __getitem__(self, rows: slice) -> Tensor:
        first, last, _ = rows.indices(self._count)
        return self._weights.read(self._key, first * self._row_bytes, max(0, last - first) * self._row_bytes)
