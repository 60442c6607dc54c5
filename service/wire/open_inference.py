"""Open Inference Protocol over HTTP: JSON and the binary tensor extension. Every name of that protocol is here.

Sources: KServe, "Open Inference Protocol", version 2; Triton, "Binary tensor data extension".
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from incipit.service.errors import Invalid, Malformed
from incipit.service.manifest import BIAS_GRAPH, GRAPH, Manifest, StemManifest, Tensor
from incipit.service.messages import Answer, AnyRequest, BiasRequest, Request, Rows, StemRequest
from incipit.service.wire.content import raw_bytes
from incipit.service.wire.native import read_json
from incipit.service.wire.rows import integers, numbers

PLATFORM = "onnx_onnxv1"
EXTENSIONS = ("binary_tensor_data",)
DATATYPES = {"float32": "FP32", "int64": "INT64"}
OWN = ("input_ids", "attention_mask", "position_ids")
"""Inputs of rows that have a field of a request each."""
SHAPES = {"offset": "[1] or [batch]", **dict.fromkeys((*OWN, "token_type_ids"), "[batch, length]")}
NUMPY: dict[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "FP32": np.dtype("<f4")}
HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Input:
    """A tensor of a request, whose data is a flat list of JSON or bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any] | memoryview


@dataclass(frozen=True)
class Infer:
    """A request, the caller's id for it, and which of its outputs are wanted as bytes."""

    request: AnyRequest
    id: str | None
    binary: Mapping[str, bool]


def inputs_of(manifest: Manifest | StemManifest) -> dict[str, tuple[str, list[int]]]:
    """Return datatype and shape of every input, by name. Of tokens, all but `input_ids` may be left out."""
    if isinstance(manifest, StemManifest):
        return _describe((manifest.input,))
    rows = dict.fromkeys(("input_ids", *manifest.indices, "attention_mask", "position_ids"), ("INT64", [-1, -1]))
    bias = manifest.graphs[BIAS_GRAPH].inputs if manifest.bias else ()
    return rows | {"offset": ("INT64", [-1])} | _describe(bias)


def outputs_of(manifest: Manifest | StemManifest) -> dict[str, tuple[str, list[int]]]:
    """Return datatype and shape of every output, by name; the first is the one given where none is asked for."""
    if isinstance(manifest, StemManifest):
        return _describe(manifest.graphs[GRAPH].outputs)
    tokens = {name: ("FP32", [-1, -1, width]) for name, width in manifest.widths.items()}
    return tokens | _describe((manifest.bias,) if manifest.bias else ())


def _describe(tensors: Iterable[Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {
        tensor.name: (DATATYPES[tensor.dtype], [size if isinstance(size, int) else -1 for size in tensor.shape])
        for tensor in tensors
    }


def model_metadata(name: str, versions: list[int], manifest: Manifest | StemManifest) -> dict[str, Any]:
    """Return what the protocol tells of a model."""
    return {
        "name": name,
        "versions": [str(version) for version in versions],
        "platform": PLATFORM,
        **{
            side: [{"name": tensor, "datatype": datatype, "shape": shape} for tensor, (datatype, shape) in all_.items()]
            for side, all_ in (("inputs", inputs_of(manifest)), ("outputs", outputs_of(manifest)))
        },
    }


def read_infer(body: bytes, header_length: str | None, manifest: Manifest | StemManifest) -> Infer:
    """Read an inference request; `header_length` is the header that says where the JSON ends, if there is one.

    Raises:
        Malformed: bytes and their declared sizes disagree, or no JSON.
        Invalid: a name, type, shape or value is not allowed.

    """
    end = len(body) if header_length is None else _header_length(header_length, len(body))
    document = read_json(body[:end])
    inputs = _read_inputs(_objects("inputs", document.get("inputs")), memoryview(body)[end:])
    parameters = _parameters("parameters", document)
    refuse_sequences(parameters)
    id_ = document.get("id")
    if id_ is not None and not isinstance(id_, str):
        raise Invalid("id", id_, "a string")
    default = _flag("binary_data_output", parameters, default=False)
    asked = [] if document.get("outputs") is None else _objects("outputs", document["outputs"])
    outputs = read_outputs([output.get("name") for output in asked], manifest)
    binary = dict.fromkeys(outputs, default) | {
        output["name"]: _flag("binary_data", _parameters(f"outputs[{index}].parameters", output), default)
        for index, output in enumerate(asked)
    }
    return Infer(to_request(inputs, outputs, manifest), id_, binary)


def read_outputs(names: list[Any], manifest: Manifest | StemManifest) -> tuple[str, ...]:
    """Read the names of the outputs that are asked for; none for the first, `embeddings`.

    Raises:
        Invalid: a name is unknown or repeated.

    """
    known = outputs_of(manifest)
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in known or name in names[:index]:
            raise Invalid(f"outputs[{index}].name", name, f"{', '.join(known)}, each once")
    return tuple(names) or (next(iter(known)),)


def refuse_sequences(parameters: Iterable[str]) -> None:
    """Raise Invalid for a parameter of Triton's sequences: ignored, it would put every step at position 0."""
    for name in parameters:
        if name.startswith("sequence_"):
            raise Invalid("parameters", name, "the input offset, which says where a row goes on")


def to_request(inputs: list[Input], outputs: tuple[str, ...], manifest: Manifest | StemManifest) -> AnyRequest:
    """Turn tensors into a request; JSON and bytes, HTTP and gRPC alike.

    Raises:
        Invalid: an unknown or repeated name, a missing tensor, or a type or shape that is not allowed.

    """
    if isinstance(manifest, StemManifest):
        tensors = _read(inputs, inputs_of(manifest), manifest.input.name)
        return StemRequest(input=manifest.input.name, values=tensors[manifest.input.name])
    if manifest.bias and manifest.bias.name in outputs:
        if len(outputs) > 1:
            raise Invalid("outputs", list(outputs), f"{manifest.bias.name} alone, since it is not of tokens")
        lengths = _describe(manifest.graphs[BIAS_GRAPH].inputs)
        tensors = _read(inputs, lengths, *(name for name in lengths if name != "query_offset"))
        values: dict[str, Any] = {name: int(tensor[0]) for name, tensor in tensors.items()}
        return BiasRequest(**values)
    # Segments are known to every model, to be refused as what they are.
    known = inputs_of(manifest) | {"token_type_ids": ("INT64", [-1, -1])}
    tensors = _read(inputs, known, "input_ids")
    offset = tensors.pop("offset", None)
    given = {name: Rows.of_array(tensor) for name, tensor in tensors.items()}
    own: dict[str, Any] = {name: given.pop(name) for name in OWN if name in given}
    return Request(**own, offset=offset, indices=given, outputs=outputs)


def _read(inputs: list[Input], known: Mapping[str, tuple[str, list[int]]], *needed: str) -> dict[str, NDArray[Any]]:
    """Return the tensors by name; sizes of `known` that are -1 are free."""
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in inputs:
        if tensor.name not in known:
            raise Invalid("inputs.name", tensor.name, ", ".join(known))
        if tensor.name in tensors:
            raise Invalid("inputs.name", f"{tensor.name} twice", "each name once")
        datatype, shape = known[tensor.name]
        if tensor.datatype != datatype:
            raise Invalid(f"{tensor.name}.datatype", tensor.datatype, datatype)
        if len(tensor.shape) != len(shape) or any(
            size not in (-1, got) for size, got in zip(shape, tensor.shape, strict=True)
        ):
            raise Invalid(f"{tensor.name}.shape", list(tensor.shape), SHAPES.get(tensor.name, str(shape)))
        if 0 in tensor.shape:  # any number of empty rows fits in a few bytes
            raise Invalid(f"{tensor.name}.shape", list(tensor.shape), "sizes of 1 or more")
        tensors[tensor.name] = _array(tensor)
    for name in needed:
        if name not in tensors:
            raise Invalid("inputs", f"no {name}", f"a tensor {name}")
    return tensors


def write_infer(answer: Answer, infer: Infer) -> tuple[list[bytes | memoryview], int | None]:
    """Return the parts of a response body, and the length of the JSON where bytes follow it."""
    document: dict[str, Any] = {"model_name": answer.model, "model_version": str(answer.version)}
    if infer.id is not None:
        document["id"] = infer.id
    document["outputs"], parts = [], []
    for name, tensor in answer.tensors.items():
        output: dict[str, Any] = {"name": name, "datatype": DATATYPES[answer.dtype], "shape": tensor.shape}
        if infer.binary[name]:
            parts.append(raw_bytes(tensor))
            output["parameters"] = {"binary_data_size": parts[-1].nbytes}
        elif np.isfinite(tensor).all():
            output["data"] = tensor.reshape(-1)
        else:
            allowed = "binary_data, since a value is infinite or no number, which JSON cannot hold"
            raise Invalid(f"outputs {name}", "JSON", allowed)
        document["outputs"].append(output)
    header = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return [header, *parts], len(header) if parts else None


def _header_length(text: str, length: int) -> int:
    # 20 digits hold any length; more would only cost time.
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) > length:
        raise Malformed(HEADER_LENGTH, text, f"0 to {length}, the length of the body")
    return int(text)


def _read_inputs(documents: list[dict[str, Any]], binary: memoryview) -> list[Input]:
    inputs, position = [], 0
    for index, document in enumerate(documents):
        where = f"inputs[{index}]"
        name, datatype, shape = document.get("name"), document.get("datatype"), document.get("shape")
        if not isinstance(name, str) or not isinstance(datatype, str):
            raise Invalid(where, [name, datatype], "two strings, name and datatype")
        if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
            raise Invalid(f"{where}.shape", shape, "a list of sizes")
        size = _parameters(f"{where}.parameters", document).get("binary_data_size")
        data: list[Any] | memoryview
        if size is None:
            data = _flatten(f"{where}.data", document.get("data"))
        elif "data" in document:
            raise Invalid(where, "data and binary_data_size", "one of them")
        elif type(size) is not int or not 0 <= size <= len(binary) - position:
            raise Malformed(
                f"{where}.binary_data_size", size, f"0 to {len(binary) - position}, the bytes that are left"
            )
        else:
            data, position = binary[position : position + size], position + size
        inputs.append(Input(name, datatype, tuple(shape), data))
    if position != len(binary):
        raise Malformed("body", f"{len(binary) - position} bytes more", "the bytes that binary_data_size declares")
    return inputs


def _array(tensor: Input) -> NDArray[Any]:
    """Return the data of a tensor in its shape."""
    # Python's integers: no product of declared sizes can wrap.
    count, dtype = math.prod(tensor.shape), NUMPY[tensor.datatype]
    if isinstance(tensor.data, memoryview):
        if len(tensor.data) != dtype.itemsize * count:
            declared = f"{dtype.itemsize * count} bytes for shape {list(tensor.shape)}"
            raise Malformed(tensor.name, f"{len(tensor.data)} bytes", declared)
        # Bytes behind a JSON header begin anywhere; onnxruntime wants them aligned.
        values: NDArray[Any] = np.require(np.frombuffer(tensor.data, dtype), requirements="A")
    else:
        if len(tensor.data) != count:
            raise Invalid(
                f"{tensor.name}.data", f"{len(tensor.data)} values", f"{count} for shape {list(tensor.shape)}"
            )
        read = integers if tensor.datatype == "INT64" else numbers
        values = read(f"{tensor.name}.data", tensor.data)
    return values.reshape(tensor.shape)


def _flatten(where: str, data: Any) -> list[Any]:
    """Flatten nested lists, in row-major order; the protocol allows either form."""
    if not isinstance(data, list):
        raise Invalid(where, data, "a list")
    flat: list[Any] = data
    while any(isinstance(item, list) for item in flat):
        if not all(isinstance(item, list) for item in flat):
            raise Invalid(where, "lists beside numbers", "nested lists of one depth, or a flat list")
        flat = list(chain.from_iterable(flat))
    return flat


def _objects(where: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Invalid(where, value, "a list of objects")
    return value


def _parameters(where: str, document: Mapping[str, Any]) -> dict[str, Any]:
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Invalid(where, parameters, "an object")
    return parameters


def _flag(name: str, parameters: Mapping[str, Any], default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise Invalid(f"parameters.{name}", value, "true or false")
    return value
