"""Messages of the Open Inference Protocol over gRPC: requests from messages, and messages from results.

Raw tensors of requests are views of the message. Protobuf's parser copies a raw tensor twice, and holds the GIL
meanwhile: other requests would wait for these copies. NumPy copies an unaligned view once, without the GIL.

Source: Protocol Buffers, "Encoding".
"""

import asyncio
import ctypes
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple, cast

import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from preblock.service.codecs.chunks import MIN_WRITE_BYTES, Buffer, as_bytes
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.codecs.v2.metadata import Manifests
from preblock.service.codecs.v2.parameters import (
    INPUT_PARAMETERS,
    ReadShared,
    find_ignored,
    range_parameters,
    read_options,
    read_range,
    refuse_shared,
)
from preblock.service.codecs.v2.requests import InferMessage, InputTensor, attach_shared, to_request
from preblock.service.codecs.v2.responses import IGNORED, list_outputs
from preblock.service.core.decode_ops import RunningRows
from preblock.service.core.errors import Invalid, Malformed, TooLarge
from preblock.service.core.types import ChunkedTensor, Result

RAW_CONTENTS = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
MIN_SPLIT_BYTES = 2**16
"""Protobuf parses a shorter message in less time than `_split`."""
MAX_SPLIT_FIELDS = 64
"""Most fields that `_split` reads. Messages of clients have fewer: one for each tensor, output and parameter."""
MAX_TAG_BYTES, MAX_VARINT_BYTES = 5, 10
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5
"""Wire types of fields; there are two others, for the groups of old messages."""
CONTENTS = {
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}
"""Field of `InferTensorContents` for each accepted datatype."""
MAX_TENSOR_BYTES = 2**31 - 1 - 2**16
"""A gRPC message ends at 2 GiB; 64 KiB remain for the description of the tensors."""


class RequestMessage(NamedTuple):
    """A parsed message.

    Args:
        fields: all fields, with or without the raw contents.
        raw_contents: bytes of the raw tensors, in order.

    """

    fields: pb.ModelInferRequest
    raw_contents: Sequence[bytes | memoryview]


def read(kind: Any, message: bytes) -> Any:
    """Read a message of a generated class.

    Raises:
        Malformed: the bytes are not such a message.

    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise Malformed("message", f"{len(message)} bytes", f"a message {kind.DESCRIPTOR.full_name}") from error


def read_request(message: bytes) -> RequestMessage:
    """Read a request. In a long message the raw contents are views of `message`.

    Raises:
        Malformed: the bytes are not such a message.

    """
    if len(message) >= MIN_SPLIT_BYTES and (parts := _split(message)) is not None:
        others, raw_contents = parts
        return RequestMessage(read(pb.ModelInferRequest, others), raw_contents)
    fields = read(pb.ModelInferRequest, message)
    return RequestMessage(fields, fields.raw_input_contents)


def _split(message: bytes) -> tuple[bytes, list[memoryview]] | None:
    """Return the bytes of all other fields, and views of the raw contents; None if protobuf must read the message."""
    view, position = memoryview(message), 0
    others: list[memoryview] = []
    raw_contents: list[memoryview] = []
    try:
        for _ in range(MAX_SPLIT_FIELDS + 1):
            if position == len(message):
                return (b"".join(others), raw_contents) if raw_contents else None
            tag, start = _read_varint(message, position)
            if start > position + MAX_TAG_BYTES:
                return None
            field, wire_type = tag >> 3, tag & 7
            if wire_type == BYTES:
                size, start = _read_varint(message, start)
                end = start + size
            elif wire_type == VARINT:
                _, end = _read_varint(message, start)
            elif wire_type in (FIXED_64, FIXED_32):
                end = start + (8 if wire_type == FIXED_64 else 4)
            else:
                return None
            if end > len(message):
                return None
            if field == RAW_CONTENTS and wire_type == BYTES:
                raw_contents.append(view[start:end])
            else:
                others.append(view[position:end])
            position = end
    except IndexError:  # an incomplete integer
        pass
    return None


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a variable-width integer, and the position after it; raise IndexError without a complete one."""
    value = 0
    for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
    raise IndexError


def read_infer(
    request: RequestMessage,
    manifest: Manifests,
    max_values: int | None = None,
    read_shared: ReadShared = refuse_shared,
) -> InferMessage:
    """Read an inference request, with raw bytes for all inputs or for none, except inputs in shared memory.

    Args:
        request: the message, parsed.
        manifest: of the model.
        max_values: maximum values of an input that is not raw; default None: any number.
        read_shared: reads tensors in shared memory; default: they are refused.

    Raises:
        TooLarge: an input has more values.
        Malformed: the numbers of raw entries and inputs differ, or a declared size is wrong.
        Invalid: a name, datatype, shape or value is not allowed.

    """
    message, raw = request
    given = [read_parameters(tensor.parameters) for tensor in message.inputs]
    ranges = [read_range(f"inputs[{index}].parameters", parameters) for index, parameters in enumerate(given)]
    sent = ranges.count(None)
    if raw and len(raw) != sent:
        raise Malformed("raw_input_contents", f"{len(raw)} entries", f"{sent}, one for each input of the message")
    entries = iter(raw)
    inputs: list[InputTensor] = []
    ignored: list[str] = []
    for index, (tensor, parameters, shared) in enumerate(zip(message.inputs, given, ranges, strict=True)):
        where = f"inputs[{index}]"
        if any(size < 0 for size in tensor.shape):
            raise Invalid(f"{where}.shape", list(tensor.shape), "a list of sizes")
        if (raw or shared) and tensor.contents.ListFields():  # some clients send empty contents
            source = "shared_memory_region" if shared else "raw_input_contents"
            raise Invalid(where, f"contents and {source}", "one of them")
        ignored += find_ignored(f"{where}.parameters", parameters, INPUT_PARAMETERS)
        if shared is not None:
            inputs.append(InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape), [], shared=shared))
            continue
        data = memoryview(next(entries)) if raw else _read_contents(where, tensor, max_values)
        # Some clients send parameters of HTTP over gRPC too.
        size = parameters.get("binary_data_size", len(data))
        if raw and size != len(data):
            raise Malformed(f"{where}.binary_data_size", size, f"{len(data)}, the bytes of its raw_input_contents")
        inputs.append(InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape), data))
    requested = [(output.name, read_parameters(output.parameters)) for output in message.outputs]
    options = read_options(read_parameters(message.parameters), requested, manifest, ignored)
    inputs = attach_shared(inputs, read_shared)
    return InferMessage(to_request(inputs, options, manifest, max_values), message.id, options)


def _read_contents(where: str, tensor: Any, max_values: int | None) -> list[Any]:
    """Return the typed contents of a tensor.

    Raises:
        Invalid: the contents have another datatype.
        TooLarge: there are more than `max_values`.

    """
    expected = CONTENTS.get(tensor.datatype)
    given = [field.name for field, _ in tensor.contents.ListFields()]
    if expected is None:  # the name and the datatype are checked with the other tensors
        return []
    if given not in ([], [expected]):
        raise Invalid(f"{where}.contents", ", ".join(given), f"{expected} for {tensor.datatype}")
    values = getattr(tensor.contents, expected)
    if max_values is not None and len(values) > max_values:
        raise TooLarge(tensor.name, f"{len(values)} values", f"at most {max_values} values")
    return list(values)


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of parameters sorted by name, because maps have no order; an empty parameter is missing."""
    choices = {name: parameters[name].WhichOneof("parameter_choice") for name in sorted(parameters)}
    return {name: getattr(parameters[name], choice) for name, choice in choices.items() if choice}


Parts = list[bytes | memoryview | ChunkedTensor]


def write_infer(answer: Result, infer: InferMessage, **parameters: bool) -> Parts:
    """Return the parts of a `ModelInferResponse`: the raw tensors, and the bytes before each.

    Protobuf would copy a tensor twice: into an object, and from there into the message.

    Raises:
        TooLarge: the tensors do not fit into a message.

    """
    found = list_outputs(answer, infer)
    regions = infer.options.regions
    size = sum(tensor.nbytes for name, _, tensor in found if name not in regions)
    if size > MAX_TENSOR_BYTES:
        raise TooLarge("outputs", f"{size} bytes", f"at most {MAX_TENSOR_BYTES} bytes; request fewer tokens")
    describe = pb.ModelInferResponse.InferOutputTensor
    outputs = [describe(name=name, datatype=datatype, shape=tensor.shape) for name, datatype, tensor in found]
    version = str(answer.version)
    for output, (name, _, tensor) in zip(outputs, found, strict=True):
        if name in regions:
            for parameter, value in range_parameters(regions[name], tensor.nbytes).items():
                kind = "string_param" if isinstance(value, str) else "int64_param"
                setattr(output.parameters[parameter], kind, value)
    head = pb.ModelInferResponse(model_name=answer.model, model_version=version, id=infer.id, outputs=outputs)
    for name, value in parameters.items():
        head.parameters[name].bool_param = value
    if infer.options.ignored:
        head.parameters[IGNORED].string_param = ", ".join(infer.options.ignored)
    parts: Parts = [head.SerializeToString()]
    for name, _, tensor in found:
        content = b"" if name in regions else as_bytes(tensor)  # clients count the entries, empty ones too
        parts += (_field_prefix(pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER, len(content)), content)
    return parts


def write_stream(answer: Result, infer: InferMessage) -> Parts:
    """Return the parts of a `ModelStreamInferResponse`, marked as the only response to its request.

    Raises:
        TooLarge: the tensors do not fit into a message.

    """
    parts = write_infer(answer, infer, triton_final_response=True)
    size = sum(map(len, parts))
    return [_field_prefix(pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER, size), *parts]


def join_message(parts: Parts) -> bytes:
    """Return the message of parts without computed tensors."""
    return b"".join(cast("list[bytes | memoryview]", parts))


# Its own function: an attribute of `pythonapi` has one signature for all libraries, and fsspec sets another one.
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""Returns bytes to be written; `bytes(size)` would clear them first."""


async def compute_message(size: int, buffers: Iterable[Buffer]) -> bytes:
    """Return the message of buffers with `size` bytes; other requests run between them, since they are computed."""
    # gRPC takes only `bytes`. BytesIO writes into the bytes of its argument and returns them, without a copy.
    message = BytesIO(_new_bytes(None, size))
    for buffer in buffers:
        message.write(buffer)
        if len(buffer) > MIN_WRITE_BYTES and message.tell() < size:
            del buffer  # lets the next one reuse the memory
            await asyncio.sleep(0)
    if message.tell() != size:
        raise RuntimeError(f"{message.tell()} of {size} bytes of a message")
    return message.getvalue()


def _field_prefix(field: int, size: int) -> bytes:
    """Return the prefix of a field of `size` bytes: number, wire type 2, and size (Protocol Buffers, "Encoding")."""
    varint = bytearray((field << 3 | 2,))
    while size >= 0x80:
        varint.append(size & 0x7F | 0x80)
        size >>= 7
    varint.append(size)
    return bytes(varint)


def write_stream_error(message: str, id_: str) -> pb.ModelStreamInferResponse:
    """Write the error of one request of a stream, with the id of the request."""
    return pb.ModelStreamInferResponse(error_message=message, infer_response=pb.ModelInferResponse(id=id_))


def write_closing(
    reason: str, sequences: Iterable[tuple[str, int, int | str, RunningRows]]
) -> pb.ModelStreamInferResponse:
    """Write a close message: the reason, and model, version, id, offsets and contexts of each sequence."""
    positions: list[dict[str, Any]] = []
    for model, version, id_, running in sequences:
        of = {"model_name": model, "model_version": str(version), "sequence_id": id_}
        context = {} if running.context is None else {"next_context": running.context.tolist()}
        positions.append({**of, "next_offset": running.offset.tolist(), **context})
    return write_stream_error(orjson.dumps({"closing": reason, "sequences": positions}).decode(), "")


def write(kind: Any, document: dict[str, Any]) -> bytes:
    """Write a document of the HTTP API as a message of a generated class."""
    message: bytes = ParseDict(document, kind()).SerializeToString()
    return message


def register_renamed(file: Any, old: str, new: str) -> None:
    """Register a copy of the file descriptor `file` with `new` instead of `old` in every name."""
    described = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(described)
    text = text_format.MessageToString(described).replace(old, new)
    copy = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(copy.SerializeToString())
