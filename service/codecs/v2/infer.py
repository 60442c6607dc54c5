"""Requests of the Open Inference Protocol over HTTP: JSON and the binary tensor extension.

Sources: KServe, "Open Inference Protocol", version 2; Triton, "Binary tensor data extension".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.names import BIAS_GRAPH, CONTEXT, NGRAMS, STORED
from preblock.service.codecs.fields import format_value, refuse_unknown
from preblock.service.codecs.native_json import read_json
from preblock.service.codecs.token_rows import POSITIONS, row_fields, token_inputs
from preblock.service.codecs.v2.infer_parts import to_parts_request
from preblock.service.codecs.v2.infer_tensors import (
    INPUT_FIELDS,
    NUMPY_DTYPES,
    InferHeader,
    InputTensor,
    attach_contents,
    attach_shared,
    check_tensors,
    read_inputs,
    read_objects,
    read_parameters,
    read_tensors,
    to_text,
)
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
from preblock.service.codecs.v2.parameters import InferOptions, read_options
from preblock.service.codecs.v2.row_outputs import ROW_OUTPUTS, TEXT_OUTPUTS
from preblock.service.codecs.v2.shared_memory import ReadShared, refuse_shared
from preblock.service.core.errors import Invalid, Malformed
from preblock.service.core.types import (
    AnyRequest,
    PairwiseBiasRequest,
    StemRequest,
    TextRequest,
    TokenRequest,
    TokenRows,
)

FIELDS = ("id", "parameters", "inputs", "outputs", "model_name")
"""Fields of a request; some clients repeat the model name of the path."""
OUTPUT_FIELDS = ("name", "parameters")
MAX_CACHED_HEADER_BYTES = 2048
"""A header with all inputs of a model is shorter."""
HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class InferMessage:
    """A request, the client's id for it, and its options."""

    request: AnyRequest
    id: str | None
    options: InferOptions

    @property
    def binary(self) -> Mapping[str, bool]:
        """For each output in order, whether it has the form of bytes over HTTP or in shared memory."""
        return self.options.binary


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
        return StemRequest(input=manifest.input.name, values=tensors[manifest.input.name], dtype=options.dtype)
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
        _check_text(tensors | dict.fromkeys((PARTS,) if parts else ()), options)
        return TextRequest(text=text, spans=any(name in options.binary for name in TEXT_OUTPUTS), **wanted)
    for name in TEXT_OUTPUTS:
        if name in options.binary:
            message = f"outputs: {name} needs the input text, because it describes the tokens of a text"
            raise Invalid("outputs", name, "an output of token ids", message=message)
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


def _check_text(tensors: Mapping[str, NDArray[Any] | None], options: InferOptions) -> None:
    """Raise Invalid for inputs and options that need the ids of the client."""
    for name in tensors:
        message = f"{name} cannot be used with text, because the tokenizer makes the tokens of a text"
        raise Invalid(name, f"text and {name}", "one of them", message=message)
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
