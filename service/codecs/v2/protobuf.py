"""Messages of the Open Inference Protocol over gRPC: requests from messages, and messages from results."""

import asyncio
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, cast

import orjson
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from preblock.service.codecs.chunks import as_bytes, raw_bytes
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.codecs.v2.infer import to_request
from preblock.service.codecs.v2.infer_tensors import InputTensor
from preblock.service.codecs.v2.metadata import DATATYPES, Manifests
from preblock.service.codecs.v2.parameters import INPUT_PARAMETERS, check_parameters, read_options
from preblock.service.core.errors import Invalid, Malformed, TooLarge
from preblock.service.core.results import ChunkedTensor, Result
from preblock.service.core.types import AnyRequest, Int64

MAX_TENSOR_BYTES = 2**31 - 1 - 2**16
"""A gRPC message ends at 2 GiB; 64 KiB remain for the description of the tensors."""


def read(kind: Any, message: bytes) -> Any:
    """Read a message of a generated class.

    Raises:
        Malformed: the bytes are not such a message.

    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise Malformed("message", f"{len(message)} bytes", f"a message {kind.DESCRIPTOR.full_name}") from error


def read_infer(message: pb.ModelInferRequest, manifest: Manifests, max_values: int | None = None) -> AnyRequest:
    """Read an inference request, with raw bytes for all inputs or for none.

    Args:
        message: the request.
        manifest: of the model.
        max_values: maximum values of an input that is not raw; default None: any number.

    Raises:
        TooLarge: an input has more values.
        Malformed: the numbers of raw entries and inputs differ, or a declared size is wrong.
        Invalid: a name, datatype, shape or value is not allowed.

    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise Malformed("raw_input_contents", f"{len(raw)} entries", f"{len(message.inputs)}, one for each input")
    inputs = []
    for index, tensor in enumerate(message.inputs):
        where = f"inputs[{index}]"
        if any(size < 0 for size in tensor.shape):
            raise Invalid(f"{where}.shape", list(tensor.shape), "a list of sizes")
        if raw and tensor.contents.ListFields():  # some clients send empty contents
            raise Invalid(where, "contents and raw_input_contents", "one of them")
        parameters = read_parameters(tensor.parameters)
        check_parameters(f"{where}.parameters", parameters, INPUT_PARAMETERS)
        typed = tensor.contents.fp32_contents if tensor.datatype == "FP32" else tensor.contents.int64_contents
        if max_values is not None and len(typed) > max_values:
            raise TooLarge(tensor.name, f"{len(typed)} values", f"at most {max_values} values")
        data = memoryview(raw[index]) if raw else list(typed)
        # Some clients send parameters of HTTP over gRPC too.
        size = parameters.get("binary_data_size", len(data))
        if raw and size != len(data):
            raise Malformed(f"{where}.binary_data_size", size, f"{len(data)}, the bytes of its raw_input_contents")
        inputs.append(InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape), data))
    requested = [(output.name, read_parameters(output.parameters)) for output in message.outputs]
    return to_request(inputs, read_options(read_parameters(message.parameters), requested, manifest), manifest)


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of parameters sorted by name, because maps have no order; None for an empty parameter."""
    choices = {name: parameters[name].WhichOneof("parameter_choice") for name in sorted(parameters)}
    return {name: getattr(parameters[name], choice) if choice else None for name, choice in choices.items()}


Parts = list[bytes | memoryview | ChunkedTensor]


def write_infer(answer: Result, id_: str, **parameters: bool) -> Parts:
    """Return the parts of a `ModelInferResponse`: the raw tensors, and the bytes before each.

    Protobuf would copy a tensor twice: into an object, and from there into the message.

    Raises:
        TooLarge: the tensors do not fit into a message.

    """
    size = sum(tensor.nbytes for tensor in answer.tensors.values())
    if size > MAX_TENSOR_BYTES:
        raise TooLarge("outputs", f"{size} bytes", f"at most {MAX_TENSOR_BYTES} bytes; request fewer tokens")
    describe = pb.ModelInferResponse.InferOutputTensor
    outputs = [
        describe(name=name, datatype=DATATYPES[answer.dtype], shape=tensor.shape)
        for name, tensor in answer.tensors.items()
    ]
    head = pb.ModelInferResponse(model_name=answer.model, model_version=str(answer.version), id=id_, outputs=outputs)
    for name, value in parameters.items():
        head.parameters[name].bool_param = value
    parts: Parts = [head.SerializeToString()]
    for tensor in answer.tensors.values():
        field = _field_prefix(pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER, tensor.nbytes)
        parts += (field, as_bytes(tensor))
    return parts


def write_stream(answer: Result, id_: str) -> Parts:
    """Return the parts of a `ModelStreamInferResponse`, marked as the only response to its request.

    Raises:
        TooLarge: the tensors do not fit into a message.

    """
    parts = write_infer(answer, id_, triton_final_response=True)
    size = sum(map(len, parts))
    return [_field_prefix(pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER, size), *parts]


def join_message(parts: Parts) -> bytes:
    """Return the message of parts without computed tensors."""
    return b"".join(cast("list[bytes | memoryview]", parts))


async def compute_message(parts: Parts) -> bytes:
    """Return the message of parts; other requests run between the computed chunks."""
    size = sum(map(len, parts))
    # gRPC takes only `bytes`. BytesIO writes into the bytes of its argument and returns them, without a copy.
    message = BytesIO(bytes(size))
    for part in parts:
        if isinstance(part, ChunkedTensor):
            for chunk in part:
                message.write(raw_bytes(chunk))
                del chunk  # the next chunk may reuse the buffer
                await asyncio.sleep(0)
        else:
            message.write(part)
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


def write_closing(reason: str, sequences: Iterable[tuple[str, int, int | str, Int64]]) -> pb.ModelStreamInferResponse:
    """Write a close message: the reason, and model, version, id and offsets of each sequence."""
    positions = [
        {"model_name": model, "model_version": str(version), "sequence_id": id_, "next_offset": offset.tolist()}
        for model, version, id_, offset in sequences
    ]
    return write_stream_error(orjson.dumps({"closing": reason, "sequences": positions}).decode(), "")


def write(kind: Any, document: dict[str, Any]) -> Any:
    """Write a document of the HTTP API as a message of a generated class."""
    return ParseDict(document, kind())
