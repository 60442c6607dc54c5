"""Responses of the Open Inference Protocol in JSON and binary.

Letters: B batch, L length, T tokens of all rows.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.codecs.chunks import Part, as_bytes
from preblock.service.codecs.native_json import write_json, write_json_parts, write_numbers
from preblock.service.codecs.v2.metadata import DATATYPES
from preblock.service.codecs.v2.parameters import ROW_OUTPUTS, TEXT_OUTPUTS, range_parameters
from preblock.service.codecs.v2.requests import InferMessage
from preblock.service.core.errors import Invalid
from preblock.service.core.types import ChunkedTensor, EmbedResult, Int64, Result, Tensor

IGNORED = "ignored_parameters"
"""Response parameter: the names of the ignored request parameters, separated by commas."""


def list_outputs(answer: Result, infer: InferMessage) -> list[tuple[str, str, Tensor]]:
    """Return name, datatype and tensor of every output, in the order of the request."""
    outputs: list[tuple[str, str, Tensor]] = []
    for name in infer.options.binary:
        if name in ROW_OUTPUTS and isinstance(answer, EmbedResult):
            outputs.append((name, "INT64", row_output(answer, name)))
        else:
            outputs.append((name, DATATYPES[answer.tensors[name].dtype.name], answer.tensors[name]))
    return outputs


def write_infer(answer: Result, infer: InferMessage) -> tuple[list[Part], int | None]:
    """Return the parts of a response body, and the length of its JSON if binary tensors follow it."""
    document: dict[str, Any] = {"model_name": answer.model, "model_version": str(answer.version)}
    if infer.id is not None:
        document["id"] = infer.id
    if infer.options.ignored:
        document["parameters"] = {IGNORED: ", ".join(infer.options.ignored)}
    document["outputs"], parts = [], []
    for name, datatype, tensor in list_outputs(answer, infer):
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": tensor.shape}
        if name in infer.options.regions:
            output["parameters"] = range_parameters(infer.options.regions[name], tensor.nbytes)
        elif infer.options.binary[name]:
            parts.append(as_bytes(tensor))
            output["parameters"] = {"binary_data_size": tensor.nbytes}
        else:
            if datatype != "INT64" and not isinstance(tensor, ChunkedTensor):
                check_finite(name, tensor)
            output["data"] = write_numbers(tensor, (math.prod(tensor.shape),))
        document["outputs"].append(output)
    if not parts:
        return write_json_parts(document), None
    header = write_json(document)
    return [header, *parts], len(header)


def check_finite(output: str, tensor: NDArray[np.generic]) -> None:
    """Raise Invalid for infinities and NaN, because JSON cannot hold them."""
    if not np.isfinite(tensor).all():
        message = f"output {output}: JSON cannot hold its infinite values or NaN; request binary_data"
        raise Invalid(f"outputs {output}", "JSON", "binary_data", message=message)


def row_output(answer: EmbedResult, name: str) -> Int64:
    """Return an output of ROW_OUTPUTS.

    `lengths`, `next_offset`, `position_delta` and `truncated` are int64 (B,), `next_context` (B, H). `input_ids` is
    (B, L) and `spans` (B, L, 2), or (T,) and (T, 2) for rows of different lengths.
    """
    if name not in TEXT_OUTPUTS:  # without truncation or axes, zeros
        return answer.row_values.get(name, np.zeros_like(answer.lengths))
    assert answer.input_ids is not None
    assert answer.spans is not None
    rows = answer.input_ids
    shape = (len(rows.values),) if rows.length is None else (len(rows.lengths), rows.length)
    return rows.values.reshape(shape) if name == "input_ids" else answer.spans.reshape(*shape, 2)
