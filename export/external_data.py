"""The data file of an artifact: written in chunks without copying weights, and mapped when it is read.

A front-end may fill the memory, so no second copy of a weight is made.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray

from preblock.export.progress import StepProgress
from preblock.export.table_formats import TableFormat
from preblock.service.artifacts.names import DATA, GRAPH

CHUNK_BYTES = 2**26
"""Bytes of one write."""
CHUNK_VALUES = 2**20
"""Values of a table rounded or compared at once, to bound the working memory."""
MAX_INLINE_BYTES = 256
"""Largest tensor, in bytes, stored in the graph itself."""
ALIGNMENT_BYTES = 64
"""Alignment of tensors in a data file with rounded tables, in bytes."""

Array = NDArray[Any]


class DataFile:
    """The data file of an artifact while it is written: tensors one after another, in the order of the calls.

    Args:
        stream: the file, open for writing and empty.
        progress: counts the written bytes.
        alignment: of each tensor, in bytes; default 1.

    """

    def __init__(self, stream: BinaryIO, progress: StepProgress, alignment: int = 1) -> None:
        self._stream, self._progress, self._alignment = stream, progress, alignment
        self._unflushed = 0

    def write(self, name: str, values: Array, dtype: DTypeLike | None = None) -> onnx.TensorProto:
        """Append `values` as `dtype`, by default their own, and return the tensor over them.

        A small one stays in the tensor.
        """
        type_ = values.dtype if dtype is None else np.dtype(dtype)
        if values.size * type_.itemsize <= MAX_INLINE_BYTES:
            return onnx.numpy_helper.from_array(values.astype(type_, copy=False), name)
        tensor, begin = self._reserve(name, type_, values.shape)
        self._stream.seek(begin)
        for rows in split_rows(values, CHUNK_BYTES // type_.itemsize):
            self._append(rows.astype(type_, copy=False))
            self._progress.add(rows.size * type_.itemsize)
        return tensor

    def write_rounded(self, name: str, table: Array, format_: TableFormat) -> list[onnx.TensorProto]:
        """Append `table` (V, D) rounded to `format_`, and return the tensors of its parts.

        It is rounded some rows at a time, so that it is never in memory as a whole.
        """
        whole = format_.whole(self._read(table))
        places: dict[str, int] = {}
        tensors = []
        for ending, row in format_.narrow(table[:1].astype(np.float32), whole).items():
            tensor, places[ending] = self._reserve(name + ending, row.dtype, (len(table), *row.shape[1:]))
            tensors.append(tensor)
        for rows in self._read(table):
            for ending, part in format_.narrow(rows, whole).items():
                self._stream.seek(places[ending])
                self._append(part)
                places[ending] += part.nbytes
        return tensors + [onnx.numpy_helper.from_array(part, name + ending) for ending, part in whole.items()]

    def _read(self, table: Array) -> Iterator[Array]:
        for rows in split_rows(table, CHUNK_VALUES):
            yield rows.astype(np.float32, copy=False)
            self._progress.add(4 * rows.size)

    def _reserve(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[onnx.TensorProto, int]:
        """Return the tensor of the next bytes in the file, and the first of them."""
        end = self._stream.seek(0, os.SEEK_END)
        begin, length = end + -end % self._alignment, int(np.prod(shape)) * dtype.itemsize
        self._stream.truncate(begin + length)
        data_type = onnx.helper.np_dtype_to_tensor_dtype(dtype)
        tensor = onnx.TensorProto(name=name, dims=shape, data_type=data_type)
        set_place(tensor, begin, length)
        return tensor, begin

    def _append(self, values: Array) -> None:
        self._stream.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        self._unflushed += values.nbytes
        if self._unflushed >= CHUNK_BYTES:  # spreads the disk writes, which progress would else not cover
            self._stream.flush()
            os.fdatasync(self._stream.fileno())
            self._unflushed = 0


def split_rows(table: Array, values: int) -> Iterator[Array]:
    """Yield the rows of `table` in order, about `values` values at once."""
    rows = max(1, values // max(1, table[:1].size))
    for begin in range(0, len(table), rows):
        yield table[begin : begin + rows]


def read_initializers(folder: Path) -> dict[str, onnx.TensorProto]:
    """Return the initializers of `model.onnx` in `folder` by name, without the data file."""
    graph = onnx.load(folder / GRAPH, load_external_data=False).graph
    return {tensor.name: tensor for tensor in graph.initializer}


def map_weights(folder: Path) -> dict[str, NDArray[Any]]:
    """Return every initializer of the main graph in `folder` by name.

    Tensors in the data file are mapped, not read. Writes to them do not change the file.
    """
    weights: dict[str, NDArray[Any]] = {}
    for name, tensor in read_initializers(folder).items():
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            offset, _ = place_of(tensor)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            weights[name] = np.memmap(folder / DATA, dtype, mode="c", offset=offset, shape=tuple(tensor.dims))
        else:
            weights[name] = onnx.numpy_helper.to_array(tensor).copy()
    return weights


def place_of(tensor: onnx.TensorProto) -> tuple[int, int]:
    """Return offset and length of a tensor in the data file, in bytes."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    return int(place["offset"]), int(place["length"])


def set_place(tensor: onnx.TensorProto, offset: int, length: int, file: str = DATA) -> None:
    """Let `tensor` refer to `length` bytes of the data file from `offset`; `file` is the name of that file."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", file), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
