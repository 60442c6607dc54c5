"""The gRPC protocols: calls, and streams of requests."""

import asyncio
from functools import partial
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from benchmarks.soak.batches import Batch
from benchmarks.soak.common import Broken, Soak, SoakFailure
from benchmarks.soak.over_http import CODES, tensors_of, vectors_of
from benchmarks.soak.questions import Array, Question, Refusal

SERVICE = "/inference.GRPCInferenceService"
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 100),
)
REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
BREAKS = ("UNAVAILABLE ", "INTERNAL Internal error from Core")
"""Messages of grpcio after a broken connection; the second one comes during a write."""


class Grpc:
    """A gRPC protocol.

    Args:
        soak: state shared by all clients.
        address: host and port of the server.

    """

    fields = rectangular = True

    def __init__(self, soak: Soak, address: str) -> None:
        self.soak = soak
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)

    def write(self, batch: Batch, random: np.random.Generator) -> Question:
        """Return a request with raw or typed contents; the answer has raw contents."""
        code = str(random.choice(list(CODES), p=(0.7, 0.3)))
        request, raw = pb.ModelInferRequest(model_name=self.soak.model), random.random() < 0.5
        request.outputs.add(name="embeddings")
        request.parameters["dtype"].string_param = code
        for name, value in batch.parameters.items():
            kind = "bool_param" if isinstance(value, bool) else "int64_param"
            setattr(request.parameters[name], kind, value)
        for name, values in tensors_of(batch).items():
            tensor = request.inputs.add(name=name, datatype="INT64", shape=values.shape)
            if raw:
                request.raw_input_contents.append(values.tobytes())
            else:
                tensor.contents.int64_contents.extend(values.ravel().tolist())
        expected = partial(vectors_of, batch, self.soak.truth, code)
        headers = {"accept-encoding": "gzip"} if random.random() < 0.1 else {}
        body, without = request.SerializeToString(deterministic=True), pb.ModelInferRequest()
        without.CopyFrom(request)
        without.ClearField("outputs")  # all outputs are then returned
        return Question(body, expected, read, headers=headers, required=without.ByteSize())

    async def leave(self) -> None:
        """Close the channel."""
        await self._channel.close()


def read(answer: Any) -> Array:
    """Return the vectors of an answer."""
    (output,), (values,) = answer.outputs, answer.raw_output_contents
    vectors: Array = np.frombuffer(values, CODES[output.datatype])
    return vectors.reshape(tuple(output.shape))


def fault(code: grpc.StatusCode, details: str | None, metadata: Any) -> Exception:
    """Return the exception for a failed call. Errors of the service have a request id in their metadata."""
    what = f"{code.name} {details}"
    if "x-request-id" not in dict(metadata or ()):
        return Broken(what) if what.startswith(BREAKS) else SoakFailure(what)
    return Refusal(what) if code in REFUSED else SoakFailure(what)


class Calls(Grpc):
    """`ModelInfer`."""

    name = "ModelInfer"

    def __init__(self, soak: Soak, address: str) -> None:
        super().__init__(soak, address)
        self._call = self._channel.unary_unary(
            f"{SERVICE}/ModelInfer", response_deserializer=pb.ModelInferResponse.FromString
        )

    async def ask(self, question: Question) -> Any:
        """Return the answer of a call."""
        try:
            return await self._call(question.body, metadata=tuple(question.headers.items()), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise fault(error.code(), error.details(), error.trailing_metadata()) from error


class Streams(Grpc):
    """`ModelStreamInfer`: a stream with one request after another."""

    name = "ModelStreamInfer"

    def __init__(self, soak: Soak, address: str) -> None:
        super().__init__(soak, address)
        self._open = self._channel.stream_stream(
            f"{SERVICE}/ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString
        )
        self._stream: Any = None

    async def ask(self, question: Question) -> Any:
        """Send a request, and return its answer; open a new stream after a broken one."""
        if self._stream is None:
            self._stream = self._open(metadata=tuple(question.headers.items()), wait_for_ready=True)
        stream = self._stream
        try:
            await stream.write(question.body)
            answer = await stream.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # InvalidStateError: write after the end
            answer = grpc.aio.EOF
        if answer is grpc.aio.EOF:
            self._stream = None
            ended = fault(await stream.code(), await stream.details(), await stream.trailing_metadata())
            raise SoakFailure(f"the server ended the stream: {ended}") if isinstance(ended, Refusal) else ended
        if answer.error_message:
            raise Refusal(answer.error_message)
        return answer.infer_response
