"""Requests of the Open Inference Protocol over HTTP: JSON and the binary tensor extension; their tensors over gRPC too.

Sources: KServe, "Open Inference Protocol", version 2; Triton, "Binary tensor data extension".
"""

import math
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.names import BIAS_GRAPH, CONTEXT, NGRAMS, STORED
from preblock.service.codecs.fields import (
    IN_TEXT,
    drop_nulls,
    format_value,
    read_one_text,
    refuse_beside_text,
    refuse_special_tokens_in_text,
    refuse_unknown,
)
from preblock.service.codecs.native_json import read_json
from preblock.service.codecs.token_rows import (
    AXES,
    INPUTS,
    POSITIONS,
    read_floats,
    read_integers,
    row_fields,
    token_inputs,
)
from preblock.service.codecs.v2.infer_parts import to_parts_request
from preblock.service.codecs.v2.metadata import (
    DATATYPES,
    PARTS,
    TEXT,
    VECTORS,
    Manifests,
    Shapes,
    describe_inputs,
    describe_tensors,
)
from preblock.service.codecs.v2.parameters import (
    INPUT_PARAMETERS,
    ROW_OUTPUTS,
    TEXT_OUTPUTS,
    InferOptions,
    ReadShared,
    find_ignored,
    read_options,
    read_range,
    refuse_shared,
)
from preblock.service.core.errors import Invalid, Malformed, read_items
from preblock.service.core.types import (
    AnyRequest,
    Int64,
    PairwiseBiasRequest,
    StemRequest,
    TextRequest,
    TokenRequest,
    TokenRows,
)
from preblock.service.runtime.shared_memory import RegionRange

FIELDS = ("id", "parameters", "inputs", "outputs", "model_name")
"""Fields of a request; some clients repeat the model name of the path."""
OUTPUT_FIELDS = ("name", "parameters")
MAX_CACHED_HEADER_BYTES = 2048
"""A header with all inputs of a model is shorter."""
HEADER_LENGTH = "Inference-Header-Content-Length"

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


@dataclass(frozen=True)
class InferMessage:
    """A request, the client's id for it, and its options."""

    request: AnyRequest
    id: str | None
    options: InferOptions


def read_infer(
    body: bytes,
    header_length: str | None,
    manifest: Manifests,
    max_values: int | None = None,
    read_shared: ReadShared = refuse_shared,
) -> InferMessage:
    """Read an inference request.

    Args:
        body: JSON, then the bytes of binary tensors.
        header_length: value of the header with the number of bytes of the JSON; None if the body is JSON alone.
        manifest: of the model.
        max_values: maximum values in the JSON; default None: any number.
        read_shared: reads tensors in shared memory; default: they are refused.

    Raises:
        TooLarge: the JSON has too many values.
        Malformed: bytes and their declared sizes disagree, or the JSON is invalid.
        Invalid: a name, type, shape or value is not allowed.

    """
    if header_length is None:
        header, binary = _read_header(body, manifest, max_values), memoryview(b"")
    else:
        end = _header_length(header_length, len(body))
        if end == 0:
            return _read_raw(body, manifest)
        if end <= MAX_CACHED_HEADER_BYTES:
            header = _cached_header(body[:end], manifest)
        else:
            header = _read_header(body[:end], manifest, max_values)
        binary = memoryview(body)[end:]
    inputs = attach_shared(attach_contents(header, binary), read_shared)
    request = to_request(inputs, header.options, manifest, max_values)
    return InferMessage(request, header.id, header.options)


def find_tensor_offsets(body: bytes, header_length: str, manifest: Manifest) -> dict[str, int] | None:
    """Return the offset of each tensor in a valid body; None if the JSON is long or holds data, or for INT32."""
    position, found = _header_length(header_length, len(body)), {}
    if position == 0:
        return {"input_ids": 0}
    if position > MAX_CACHED_HEADER_BYTES:
        return None
    for tensor in _cached_header(body[:position], manifest).inputs:
        if tensor.size is None or tensor.datatype != "INT64":
            return None
        found[tensor.name] = position
        position += tensor.size
    return found


def _read_header(text: bytes, manifest: Manifests, max_values: int | None = None) -> InferHeader:
    document = read_json(text, max_values)
    refuse_unknown(document, FIELDS)
    inputs, ignored = read_inputs(read_objects("inputs", document.get("inputs"), INPUT_FIELDS))
    id_ = document.get("id")
    if id_ is not None and not isinstance(id_, str):
        raise Invalid("id", id_, "a string")
    outputs = read_objects("outputs", document.get("outputs", []), OUTPUT_FIELDS)
    requested = [
        (output.get("name"), read_parameters(f"outputs[{index}].parameters", output))
        for index, output in enumerate(outputs)
    ]
    options = read_options(read_parameters("parameters", document), requested, manifest, ignored)
    for name, binary in options.binary.items():
        dtype = manifest.dtype_of(name, options.dtype) if isinstance(manifest, Manifest) else options.dtype
        if dtype not in ("float32", "int64", STORED) and not binary and name not in ROW_OUTPUTS:
            datatype = DATATYPES.get(dtype, dtype)
            allowed = f"binary_data, since {datatype} has no form in JSON"
            raise Invalid(f"outputs {name}", f"{datatype} as JSON", allowed)
    return InferHeader(tuple(inputs), options, id_)


_cached_header = lru_cache(_read_header)
"""Clients repeat a header with other tensor bytes."""


def _read_raw(body: bytes, manifest: Manifests) -> InferMessage:
    """Read a body with the data of the model's main input, as a batch of one; the answer is bytes."""
    known = describe_inputs(manifest)
    name = manifest.input.name if isinstance(manifest, StemManifest) else "input_ids"
    datatype, (_, *sizes) = known[name]
    if sizes.count(-1) > 1:
        raise Invalid(HEADER_LENGTH, 0, f"the length of a JSON header, since several sizes of {name} are free")
    item = NUMPY_DTYPES[datatype].itemsize * math.prod(size for size in sizes if size != -1)
    if not body or len(body) % item or (-1 not in sizes and len(body) != item):
        raise Malformed("body", f"{len(body)} bytes", f"{name} of shape {[1, *sizes]}: {item} bytes for each")
    shape = (1, *(len(body) // item if size == -1 else size for size in sizes))
    options = read_options({"binary_data_output": True}, [], manifest)
    request = to_request([InputTensor(name, datatype, shape, memoryview(body))], options, manifest)
    return InferMessage(request, None, options)


def to_request(
    inputs: list[InputTensor], options: InferOptions, manifest: Manifests, max_values: int | None = None
) -> AnyRequest:
    """Return the request of input tensors, the same for HTTP and gRPC.

    Args:
        inputs: the tensors.
        options: of the request.
        manifest: of the model.
        max_values: maximum values in the JSON of parts; default None: any number.

    Raises:
        TooLarge: the parts have too many values.
        Invalid: an unknown or repeated name, a missing tensor, or a wrong datatype or shape.

    """
    if isinstance(manifest, StemManifest):
        _refuse_token_options(options)
        tensors = read_tensors(inputs, describe_inputs(manifest), manifest.input.name)
        return StemRequest(values=tensors[manifest.input.name], dtype=options.dtype)
    if manifest.bias and manifest.bias.name in options.outputs:
        if len(options.outputs) > 1:
            raise Invalid("outputs", list(options.outputs), f"{manifest.bias.name} alone, since it has no tokens")
        return _to_bias_request(inputs, options, manifest)
    text, inputs = _read_texts(TEXT, inputs, manifest)
    parts, inputs = _read_texts(PARTS, inputs, manifest)
    tensors = read_tensors(inputs, _token_inputs(manifest), *(() if text or parts else ("input_ids",)))
    wanted = _take_options(tensors, options)
    if "next_context" in options.binary and not manifest.needs_history(options.outputs):
        message = "outputs: next_context needs an n-gram output, because no other one depends on earlier ids"
        raise Invalid("outputs", "next_context", f"{NGRAMS} beside it", message=message)
    if text:
        _check_text((*tensors, PARTS) if parts else tensors, options)
        return TextRequest(text=text, spans=any(name in options.binary for name in TEXT_OUTPUTS), **wanted)
    for name in TEXT_OUTPUTS:
        if name in options.binary:
            message = f"outputs: {name} needs the input text, because it describes the tokens of a text"
            raise Invalid("outputs", name, "an output of token ids", message=message)
    if not parts:
        refuse_special_tokens_in_text(options.special_tokens_in_text, f"parameters.{IN_TEXT}")
    if parts or VECTORS in tensors or options.placeholder_id is not None:
        return to_parts_request(parts, tensors, options, wanted, max_values)
    return _to_token_request(tensors, options, wanted)


def _take_options(tensors: dict[str, NDArray[Any]], options: InferOptions) -> dict[str, Any]:
    """Return the arguments of `EmbedOptions`, and remove `offset` and `context` from the tensors."""
    offset, context = tensors.pop("offset", None), tensors.pop(CONTEXT, None)
    if offset is not None and options.offset is not None:
        raise Invalid("parameters.offset", "an offset and an input offset", "one of them")
    return {
        "offset": options.offset if offset is None else offset,
        "context": None if context is None else TokenRows.of_array(context),
        "truncate": options.truncate,
        "pooling": options.pooling,
        "special_tokens_in_text": options.special_tokens_in_text or "allow",
        "outputs": options.outputs,
        "dtype": options.dtype,
    }


def _to_token_request(
    tensors: dict[str, NDArray[Any]], options: InferOptions, wanted: Mapping[str, Any]
) -> TokenRequest:
    """Return the request of tensors (B, L); positions may have several axes, (A, B, L)."""
    further: tuple[TokenRows, ...] = ()
    if POSITIONS in tensors and tensors[POSITIONS].ndim == 3:
        tensors[POSITIONS], *others = tensors[POSITIONS]
        further = tuple(map(TokenRows.of_array, others))
    rows = {name: TokenRows.of_array(tensor) for name, tensor in tensors.items()}
    return TokenRequest(sequence=options.sequence, **wanted, **token_inputs(rows), further_positions=further)


def _to_bias_request(inputs: list[InputTensor], options: InferOptions, manifest: Manifest) -> PairwiseBiasRequest:
    _refuse_token_options(options)
    known = describe_tensors(manifest.graphs[BIAS_GRAPH].inputs)
    tensors = read_tensors(inputs, known, *(name for name in known if name != "query_offset"))
    lengths: dict[str, Any] = {name: int(tensor[0]) for name, tensor in tensors.items()}
    return PairwiseBiasRequest(**lengths, dtype=options.dtype)


@lru_cache
def _token_inputs(manifest: Manifest) -> Shapes:
    return {**describe_inputs(manifest), **dict.fromkeys(row_fields(tuple(manifest.indices)), ("INT64", [-1, -1]))}


def _read_texts(name: str, inputs: list[InputTensor], manifest: Manifest) -> tuple[tuple[str, ...], list[InputTensor]]:
    """Return the texts of the input `name`, and the other inputs; no texts for a model without this input."""
    known = _token_inputs(manifest)
    texts = [tensor for tensor in inputs if tensor.name == name] if name in known else []
    if not texts:
        return (), inputs
    check_tensors(texts, known)
    return to_text(texts[0]), [tensor for tensor in inputs if tensor.name != name]


def _check_text(names: Iterable[str], options: InferOptions) -> None:
    """Raise Invalid for inputs and options that need the ids of the client."""
    refuse_beside_text(names)
    if options.sequence is not None:
        raise Invalid("parameters.sequence_id", format_value(options.sequence.id), "none beside text")
    if options.placeholder_id is not None:
        raise Invalid("parameters.placeholder_id", options.placeholder_id, "none beside text")


def _refuse_token_options(options: InferOptions) -> None:
    """Raise Invalid for options of tokens in a request without tokens."""
    sequence, pooling = options.sequence, options.pooling
    given = {
        "parameters.offset": None if options.offset is None else int(options.offset[0]),
        "parameters.truncate": options.truncate,
        "parameters.pooling": None if pooling == "none" else pooling,
        "parameters.placeholder_id": options.placeholder_id,
        "parameters.special_tokens_in_text": options.special_tokens_in_text,
        "parameters.sequence_id": None if sequence is None else format_value(sequence.id),
        "outputs": ", ".join(options.row_outputs) or None,
    }
    for field, value in given.items():
        if value is not None:
            raise Invalid(field, value, "none, because the request has no tokens")


def _header_length(text: str, length: int) -> int:
    # 20 digits hold any length; parsing more only costs time.
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) > length:
        raise Malformed(HEADER_LENGTH, text, f"0 to {length}, the length of the body")
    return int(text)


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
        field = f"{tensor.name}.data"
        try:
            values = read(field, tensor.data)
        except Invalid as error:
            error.items = _items_of(tensor, error.items)
            raise
        if tensor.datatype == "INT32" and (wide := values != values.astype(np.int32)).any():
            bad = np.flatnonzero(wide)
            items = _items_of(tensor, bad)
            raise Invalid(f"{field}[{bad[0]}]", int(values[bad[0]]), "a 32-bit integer", items=items)
    return (values.astype(np.int64) if tensor.datatype == "INT32" else values).reshape(tensor.shape)


def _items_of(tensor: InputTensor, index: Collection[int]) -> Int64:
    """Return the items with the values at `index`: the first indices, of positions of three axes the rows."""
    axes = np.unravel_index(np.asarray(index), tensor.shape)
    return np.unique(axes[1 if tensor.name == POSITIONS and len(axes) == 3 else 0])


def to_text(tensor: InputTensor) -> tuple[str, ...]:
    """Return the texts of a BYTES tensor: JSON strings, or UTF-8 bytes.

    Raises:
        Malformed: the bytes do not hold the declared number of elements.
        Invalid: an element is no text.

    """
    if not isinstance(tensor.data, memoryview):
        _check_count(tensor, len(tensor.data))
        return tuple(read_items(tensor.data, partial(_read_one_text, tensor)))
    content, position, texts = bytes(tensor.data), 0, []
    for index in range(tensor.shape[0]):
        begin = position + SIZE.size
        size = SIZE.unpack_from(content, position)[0] if begin <= len(content) else 0
        position = begin + size
        if position > len(content):
            declared = f"{tensor.shape[0]} texts, each after its length of {SIZE.size} bytes"
            raise Malformed(tensor.name, f"{len(content)} bytes for {index} texts", declared)
        texts.append(content[begin:position])
    if position != len(content):
        raise Malformed(tensor.name, f"{len(content) - position} bytes more", f"{tensor.shape[0]} texts")
    return tuple(read_items(texts, partial(_read_one_text, tensor)))


def _read_one_text(tensor: InputTensor, index: int, text: Any) -> str:
    """Read a text from bytes or from JSON."""
    field = f"{tensor.name}[{index}]"
    try:
        return read_one_text(field, text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise Invalid(field, format_value(text), "text in UTF-8") from error


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
