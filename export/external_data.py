"""The data file of an artifact: written in parts straight from where the weights lie, and mapped when it is read.

A front-end may be as large as memory allows once, so that nothing here copies a weight.
"""

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from preblock.export.progress import Progress, Report
from preblock.service.artifacts.manifest import DATA, GRAPH

PART = 2**26
"""Bytes that are written at once."""
SMALL = 256
"""Bytes up to which a tensor lies in the graph itself."""


def save_program(program: torch.onnx.ONNXProgram, folder: Path, report: Report) -> onnx.ModelProto:
    """Write the data file of `program` into `folder`, and return the model over it.

    The weights lie one behind the other. onnxruntime maps each from the page that it begins in.
    """
    initializers = program.model.graph.initializers.items()
    weights = {name: value.const_value.numpy() for name, value in initializers if value.const_value is not None}
    program.save(folder / GRAPH, include_initializers=False)
    model = onnx.load(folder / GRAPH)
    total = sum(values.nbytes for values in weights.values() if values.nbytes > SMALL)
    progress = Progress(report, "writing the graph", total)
    with (folder / DATA).open("wb") as stream:
        for name, values in weights.items():
            model.graph.initializer.append(_save(name, values, stream, progress))
    return model


def map_weights(model: onnx.ModelProto, folder: Path) -> dict[str, NDArray[Any]]:
    """Return every initializer of `model` by name; those in the data file are mapped, not read. Changes stay here."""
    weights: dict[str, NDArray[Any]] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            offset = next((int(entry.value) for entry in tensor.external_data if entry.key == "offset"), 0)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            weights[tensor.name] = np.memmap(folder / DATA, dtype, mode="c", offset=offset, shape=tuple(tensor.dims))
        else:
            weights[tensor.name] = onnx.numpy_helper.to_array(tensor).copy()
    return weights


def _save(name: str, values: NDArray[Any], stream: BinaryIO, progress: Progress) -> onnx.TensorProto:
    """Append `values` to the data file, and return the tensor over them."""
    if values.nbytes <= SMALL:
        return onnx.numpy_helper.from_array(values, name)
    place = {"location": DATA, "offset": str(stream.tell()), "length": str(values.nbytes)}
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    for begin in range(0, len(content), PART):
        part = content[begin : begin + PART]
        stream.write(part.data)
        if len(part) == PART:  # else the disk takes all at once at the end, when nothing tells how far it is
            stream.flush()
            os.fdatasync(stream.fileno())
        progress.add(len(part))
    dtype = onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
    tensor = onnx.TensorProto(name=name, dims=values.shape, data_type=dtype, data_location=onnx.TensorProto.EXTERNAL)
    for key, value in place.items():
        tensor.external_data.add(key=key, value=value)
    return tensor
