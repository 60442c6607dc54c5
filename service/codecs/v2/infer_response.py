"""Responses of the Open Inference Protocol in JSON and binary."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.codecs.chunks import JsonFloats, Part, as_bytes
from preblock.service.codecs.native_json_response import write_json, write_json_parts
from preblock.service.codecs.v2.infer import InferMessage
from preblock.service.codecs.v2.metadata import DATATYPES
from preblock.service.core.errors import Invalid
from preblock.service.core.results import ChunkedTensor, Result


def write_infer(answer: Result, infer: InferMessage) -> tuple[list[Part], int | None]:
    """Return the parts of a response body, and the length of its JSON if binary tensors follow it."""
    document: dict[str, Any] = {"model_name": answer.model, "model_version": str(answer.version)}
    if infer.id is not None:
        document["id"] = infer.id
    document["outputs"], parts = [], []
    for name, tensor in answer.tensors.items():
        output: dict[str, Any] = {"name": name, "datatype": DATATYPES[answer.dtype], "shape": tensor.shape}
        if infer.binary[name]:
            parts.append(as_bytes(tensor))
            output["parameters"] = {"binary_data_size": tensor.nbytes}
        elif isinstance(tensor, ChunkedTensor):
            output["data"] = JsonFloats(tensor, (math.prod(tensor.shape),))
        else:
            check_finite(name, tensor)
            output["data"] = tensor.reshape(-1)
        document["outputs"].append(output)
    if not parts:
        return write_json_parts(document), None
    header = write_json(document)
    return [header, *parts], len(header)


def check_finite(output: str, tensor: NDArray[np.generic]) -> None:
    """Raise Invalid for infinities and NaN, because JSON cannot hold them."""
    if not np.isfinite(tensor).all():
        allowed = "binary_data, since JSON cannot hold an infinite value or NaN"
        raise Invalid(f"outputs {output}", "JSON", allowed)
