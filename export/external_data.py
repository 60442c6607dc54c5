"""The data file of an artifact: written in chunks without copying weights, and mapped when it is read.

A front-end may fill the memory, so no second copy of a weight is made.
"""

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from preblock.export.progress import Report, StepProgress
from preblock.service.artifacts.names import DATA, GRAPH

CHUNK_BYTES = 2**26
"""Bytes of one write."""
MAX_INLINE_BYTES = 256
"""Largest tensor, in bytes, stored in the graph itself."""


def save_program(program: torch.onnx.ONNXProgram, folder: Path, report: Report) -> onnx.ModelProto:
    """Write the data file of `program` into `folder`, and return the model over it.

    The weights follow one another. onnxruntime maps each from the start of its first page.
    """
    initializers = program.model.graph.initializers.items()
    weights = {name: value.const_value.numpy() for name, value in initializers if value.const_value is not None}
    program.save(folder / GRAPH, include_initializers=False)
    model = onnx.load(folder / GRAPH)
    total = sum(values.nbytes for values in weights.values() if values.nbytes > MAX_INLINE_BYTES)
    step = "writing the graph"
    report(step)
    progress = StepProgress(report, step, total)
    with (folder / DATA).open("wb") as stream:
        for name, values in weights.items():
            model.graph.initializer.append(_save(name, values, stream, progress))
    return model


def map_weights(folder: Path) -> dict[str, NDArray[Any]]:
    """Return every initializer of the main graph in `folder` by name.

    Tensors in the data file are mapped, not read. Writes to them do not change the file.
    """
    weights: dict[str, NDArray[Any]] = {}
    for tensor in onnx.load(folder / GRAPH, load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            offset, _ = place_of(tensor)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            weights[tensor.name] = np.memmap(folder / DATA, dtype, mode="c", offset=offset, shape=tuple(tensor.dims))
        else:
            weights[tensor.name] = onnx.numpy_helper.to_array(tensor).copy()
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


def _save(name: str, values: NDArray[Any], stream: BinaryIO, progress: StepProgress) -> onnx.TensorProto:
    """Append `values` to the data file, and return the tensor over them."""
    if values.nbytes <= MAX_INLINE_BYTES:
        return onnx.numpy_helper.from_array(values, name)
    dtype = onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
    tensor = onnx.TensorProto(name=name, dims=values.shape, data_type=dtype)
    set_place(tensor, stream.tell(), values.nbytes)
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    for begin in range(0, len(content), CHUNK_BYTES):
        part = content[begin : begin + CHUNK_BYTES]
        stream.write(part.data)
        if len(part) == CHUNK_BYTES:  # spreads the disk writes, which progress would else not cover
            stream.flush()
            os.fdatasync(stream.fileno())
        progress.add(len(part))
    return tensor
