"""Open Inference Protocol over gRPC: its messages to requests, and answers to its messages."""

from typing import Any

from google.protobuf.message import DecodeError

from incipit.service.errors import Invalid, Malformed
from incipit.service.manifest import Manifest, StemManifest
from incipit.service.messages import Answer, AnyRequest
from incipit.service.wire import open_inference_pb2 as pb
from incipit.service.wire.content import raw_bytes
from incipit.service.wire.open_inference import DATATYPES, Input, read_outputs, refuse_sequences, to_request


def read(kind: Any, message: bytes) -> Any:
    """Read a message of a generated class.

    Raises:
        Malformed: the bytes are none.

    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise Malformed("message", f"{len(message)} bytes", f"a message {kind.DESCRIPTOR.full_name}") from error


def read_infer(message: pb.ModelInferRequest, manifest: Manifest | StemManifest) -> AnyRequest:
    """Read an inference request; all inputs are raw bytes, or none is.

    Raises:
        Malformed: the number of raw entries differs from that of the inputs.
        Invalid: a name, type, shape or value is not allowed.

    """
    refuse_sequences(message.parameters)
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise Malformed("raw_input_contents", f"{len(raw)} entries", f"{len(message.inputs)}, one for each input")
    inputs = []
    for index, tensor in enumerate(message.inputs):
        if any(size < 0 for size in tensor.shape):
            raise Invalid(f"inputs[{index}].shape", list(tensor.shape), "a list of sizes")
        if raw and tensor.HasField("contents"):
            raise Invalid(f"inputs[{index}]", "contents and raw_input_contents", "one of them")
        typed = tensor.contents.fp32_contents if tensor.datatype == "FP32" else tensor.contents.int64_contents
        data = memoryview(raw[index]) if raw else list(typed)
        inputs.append(Input(tensor.name, tensor.datatype, tuple(tensor.shape), data))
    outputs = read_outputs([output.name for output in message.outputs], manifest)
    return to_request(inputs, outputs, manifest)


def write_infer(answer: Answer, id_: str) -> pb.ModelInferResponse:
    """Write an answer; the tensors are raw bytes."""
    describe = pb.ModelInferResponse.InferOutputTensor
    return pb.ModelInferResponse(
        model_name=answer.model,
        model_version=str(answer.version),
        id=id_,
        outputs=[
            describe(name=name, datatype=DATATYPES[answer.dtype], shape=tensor.shape)
            for name, tensor in answer.tensors.items()
        ],
        raw_output_contents=[bytes(raw_bytes(tensor)) for tensor in answer.tensors.values()],
    )


def write_metadata(metadata: dict[str, Any]) -> pb.ModelMetadataResponse:
    """Write the metadata of a model, as `open_inference.model_metadata` returns it."""
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=metadata["name"],
        versions=metadata["versions"],
        platform=metadata["platform"],
        inputs=[tensor(**described) for described in metadata["inputs"]],
        outputs=[tensor(**described) for described in metadata["outputs"]],
    )
