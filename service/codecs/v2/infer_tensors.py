"""Input tensors of the Open Inference Protocol: JSON data and binary contents."""

import math
import struct
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.names import CONTEXT
from preblock.service.codecs.fields import drop_nulls, format_value, refuse_unknown
from preblock.service.codecs.native_json import read_text
from preblock.service.codecs.token_rows import AXES, INPUTS, POSITIONS, read_floats, read_integers
from preblock.service.codecs.v2.metadata import PARTS, TEXT, Shapes
from preblock.service.codecs.v2.parameters import INPUT_PARAMETERS, InferOptions, find_ignored
from preblock.service.codecs.v2.shared_memory import ReadShared, read_range
from preblock.service.core.errors import Invalid, Malformed
from preblock.service.core.shared_region import RegionRange

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
    "FP32": np.dtype("<f4"),
}
ACCEPTED = {"INT64": ("INT64", "INT32"), "FP32": ("FP32",), "BYTES": ("BYTES",)}
"""Datatypes of a request, by the declared datatype of the input."""
SIZE = struct.Struct("<I")
"""The length before each element of a BYTES tensor (Triton, "Binary tensor data extension")."""

SHAPE_TEXTS = {
    "offset": "[1] or [batch]",
    CONTEXT: "[batch, the history of the model]",
    **dict.fromkeys((TEXT, PARTS), "[batch]"),
    **dict.fromkeys((*INPUTS, "token_type_ids"), "[batch, length]"),
    POSITIONS: f"[batch, length], or [{AXES}, batch, length]",
}
INPUT_FIELDS = ("name", "datatype", "shape", "parameters", "data")


class InputTensor(NamedTuple):
    """A tensor of a request.

    Args:
        name: of the input.
        datatype: as the client declares it.
        shape: as the client declares it.
        data: a flat list from JSON, or bytes.
        size: unchecked number of bytes behind the JSON, from which `data` follows; None for other tensors.
        shared: range in shared memory, from which `data` follows; None for other tensors.

    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any] | memoryview
    size: Any = None
    shared: RegionRange | None = None


class InferHeader(NamedTuple):
    """The parsed JSON of a request."""

    inputs: tuple[InputTensor, ...]
    options: InferOptions
    id: str | None


def read_inputs(documents: list[dict[str, Any]]) -> tuple[list[InputTensor], list[str]]:
    """Return the inputs of a JSON header and their ignored parameters; raise Invalid for a wrong or missing field."""
    inputs: list[InputTensor] = []
    ignored: list[str] = []
    for index, document in enumerate(documents):
        where = f"inputs[{index}]"
        name, datatype, shape = document.get("name"), document.get("datatype"), document.get("shape")
        if not isinstance(name, str) or not isinstance(datatype, str):
            raise Invalid(where, [name, datatype], "two strings, name and datatype")
        if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
            raise Invalid(f"{where}.shape", shape, "a list of sizes")
        parameters = read_parameters(f"{where}.parameters", document)
        ignored += find_ignored(f"{where}.parameters", parameters, INPUT_PARAMETERS)
        size, shared = parameters.get("binary_data_size"), read_range(f"{where}.parameters", parameters)
        sources = {"data": document.get("data"), "binary_data_size": size, "shared_memory_region": shared}
        given = [source for source, value in sources.items() if value is not None]
        if len(given) > 1:
            raise Invalid(where, " and ".join(given), "one of them")
        data = [] if given and given != ["data"] else _flatten(f"{where}.data", document.get("data"), shape)
        inputs.append(InputTensor(name, datatype, tuple(shape), data, size, shared))
    return inputs, ignored


def attach_contents(header: InferHeader, binary: memoryview) -> list[InputTensor]:
    """Return the tensors of a header, with data from the bytes behind it where the header has none."""
    inputs, position = [], 0
    for index, tensor in enumerate(header.inputs):
        size = tensor.size
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(binary) - position:
                left = f"0 to {len(binary) - position}, the remaining bytes"
                raise Malformed(f"inputs[{index}].binary_data_size", size, left)
            tensor = tensor._replace(data=binary[position : position + size])
            position += size
        inputs.append(tensor)
    if position != len(binary):
        raise Malformed("body", f"{len(binary) - position} bytes more", "the bytes that binary_data_size declares")
    return inputs


def attach_shared(inputs: list[InputTensor], read: ReadShared) -> list[InputTensor]:
    """Return the tensors, with copies of their data from shared memory where they name a range."""
    ranges = [tensor.shared for tensor in inputs if tensor.shared is not None]
    if not ranges:
        return inputs
    contents = iter(read(ranges))
    return [tensor if tensor.shared is None else tensor._replace(data=memoryview(next(contents))) for tensor in inputs]


def read_tensors(inputs: list[InputTensor], known: Shapes, *needed: str) -> dict[str, NDArray[Any]]:
    """Return the tensors by name, checked against `known`; `needed` names the required ones.

    Raises:
        Invalid: an unknown or repeated name, a missing tensor, or a wrong datatype or shape.
        Malformed: another number of bytes than a shape declares.

    """
    check_tensors(inputs, known)
    tensors = {tensor.name: to_array(tensor) for tensor in inputs}
    for name in needed:
        if name not in tensors:
            raise Invalid("inputs", f"no {name}", f"a tensor {name}")
    return tensors


def check_tensors(inputs: list[InputTensor], known: Shapes) -> None:
    """Check name, datatype and shape of each tensor against `known`; sizes of -1 there are free.

    Raises:
        Invalid: an unknown or repeated name, or a wrong datatype or shape.

    """
    seen: set[str] = set()
    for tensor in inputs:
        if tensor.name not in known:
            raise Invalid("inputs.name", tensor.name, ", ".join(known))
        if tensor.name in seen:
            raise Invalid("inputs.name", f"{tensor.name} twice", "each name once")
        seen.add(tensor.name)
        datatype, shape = known[tensor.name]
        if tensor.datatype not in ACCEPTED[datatype]:
            raise Invalid(f"{tensor.name}.datatype", tensor.datatype, " or ".join(ACCEPTED[datatype]))
        if tensor.name == POSITIONS and len(tensor.shape) == 3:
            shape = [AXES, *shape]
        if len(tensor.shape) != len(shape) or any(
            size not in (-1, got) for size, got in zip(shape, tensor.shape, strict=True)
        ):
            raise Invalid(f"{tensor.name}.shape", list(tensor.shape), SHAPE_TEXTS.get(tensor.name, str(shape)))
        if 0 in tensor.shape:  # a few bytes can declare any number of empty rows
            raise Invalid(f"{tensor.name}.shape", list(tensor.shape), "sizes of 1 or more")


def to_array(tensor: InputTensor) -> NDArray[Any]:
    """Return the data of an INT64, INT32 or FP32 tensor as an array of its shape, int64 or float32."""
    # Python integers: the product of declared sizes cannot overflow.
    count, dtype = math.prod(tensor.shape), NUMPY_DTYPES[tensor.datatype]
    if isinstance(tensor.data, memoryview):
        if len(tensor.data) != dtype.itemsize * count:
            declared = f"{dtype.itemsize * count} bytes for shape {list(tensor.shape)}"
            raise Malformed(tensor.name, f"{len(tensor.data)} bytes", declared)
        # Bytes behind a JSON header may be unaligned; onnxruntime needs aligned arrays.
        values: NDArray[Any] = np.require(np.frombuffer(tensor.data, dtype), requirements="A")
    else:
        _check_count(tensor, len(tensor.data))
        read = read_floats if tensor.datatype == "FP32" else read_integers
        values = read(f"{tensor.name}.data", tensor.data)
        if tensor.datatype == "INT32" and (wide := values != values.astype(np.int32)).any():
            index = int(np.argmax(wide))
            raise Invalid(f"{tensor.name}.data[{index}]", int(values[index]), "a 32-bit integer")
    return (values.astype(np.int64) if tensor.datatype == "INT32" else values).reshape(tensor.shape)


def to_text(tensor: InputTensor) -> tuple[str, ...]:
    """Return the texts of a BYTES tensor: JSON strings, or UTF-8 bytes.

    Raises:
        Malformed: the bytes do not hold the declared number of elements.
        Invalid: an element is no text.

    """
    if not isinstance(tensor.data, memoryview):
        _check_count(tensor, len(tensor.data))
        return read_text(tensor.name, [_decode(tensor, *item) for item in enumerate(tensor.data)])
    content, position, texts = bytes(tensor.data), 0, []
    for index in range(tensor.shape[0]):
        begin = position + SIZE.size
        size = SIZE.unpack_from(content, position)[0] if begin <= len(content) else 0
        position = begin + size
        if position > len(content):
            declared = f"{tensor.shape[0]} texts, each after its length of {SIZE.size} bytes"
            raise Malformed(tensor.name, f"{len(content)} bytes for {index} texts", declared)
        texts.append(_decode(tensor, index, content[begin:position]))
    if position != len(content):
        raise Malformed(tensor.name, f"{len(content) - position} bytes more", f"{tensor.shape[0]} texts")
    return read_text(tensor.name, texts)


def _decode(tensor: InputTensor, index: int, text: Any) -> Any:
    """Return bytes as text, and a value of JSON unchanged."""
    try:
        return text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise Invalid(f"{tensor.name}[{index}]", format_value(text), "text in UTF-8") from error


def _check_count(tensor: InputTensor, values: int) -> None:
    """Raise Invalid if a list holds another number of values than its shape declares."""
    if values != (count := math.prod(tensor.shape)):
        raise Invalid(f"{tensor.name}.data", f"{values} values", f"{count} for shape {list(tensor.shape)}")


def _flatten(where: str, data: Any, shape: list[int]) -> list[Any]:
    """Return the values of a flat list, or those of lists nested like `shape`, in row-major order.

    Raises:
        Invalid: another type, or lists of other sizes. The number of values in a flat list is not checked.

    """
    if not isinstance(data, list):
        raise Invalid(where, data, "a list")
    flat, sizes = data, [{len(data)}]
    while list in (types := set(map(type, flat))):
        if len(types) > 1:
            raise Invalid(where, "lists beside numbers", "nested lists of one depth, or a flat list")
        sizes.append(set(map(len, flat)))
        flat = list(chain.from_iterable(flat))
    if len(sizes) > 1 and sizes != [{size} for size in shape]:
        got = ", ".join(" to ".join(map(str, sorted({min(size), max(size)}))) for size in sizes)
        raise Invalid(where, f"nested lists of the sizes [{got}]", f"the sizes {shape}, or a flat list")
    return flat


def read_objects(where: str, value: Any, known: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return a list of objects without unknown fields and nulls; raise Invalid for any other value."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Invalid(where, "nothing" if value is None else value, "a list of objects")
    objects = [drop_nulls(item) for item in value]
    for index, item in enumerate(objects):
        refuse_unknown(item, known, f"{where}[{index}]")
    return objects


def read_parameters(where: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an object without nulls; raise Invalid if they are not an object."""
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Invalid(where, parameters, "an object")
    return drop_nulls(parameters)
