"""The server of the Open Inference Protocol over gRPC, with the standard services for health and reflection."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from incipit.service.engine import Engine
from incipit.service.errors import UNFORESEEN, IncipitError, Unavailable
from incipit.service.rpc.calls import Calls
from incipit.service.rpc.service import InferenceService, Receive, Send
from incipit.service.rpc.status import STATUS
from incipit.service.sequences import Sequences
from incipit.service.settings import Settings
from incipit.service.streams import Closing, Lifetime, Streams
from incipit.service.wire import open_inference_pb2 as pb
from incipit.service.wire.protobuf import read

SERVICE = "inference.GRPCInferenceService"
GRACE_SECONDS = 10
ENDS = {
    "shutdown": "the end of the server while it waited",
    "idle": "nothing from its client for too long",
    "time": "more time than a stream may take",
}
LOG = logging.getLogger(__name__)

Method = Callable[[Any], Awaitable[Any]]
Stream = Callable[[Receive, Send, Lifetime], Awaitable[None]]


def _handler(method: Method, request: Any, engine: Engine, calls: Calls) -> grpc.RpcMethodHandler:
    async def call(message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await calls.begin(context)
        try:
            answer = await method(await engine.scheduler.run(len(message), lambda: read(request, message)))
            written: bytes = answer if isinstance(answer, bytes) else answer.SerializeToString()
            return written
        except IncipitError as error:
            await context.abort(STATUS[type(error)], str(error))
        except Exception:
            LOG.exception("a gRPC call failed in an unforeseen way")
            await context.abort(grpc.StatusCode.INTERNAL, UNFORESEEN)

        raise AssertionError("abort raises")

    # Without a deserializer of its own, gRPC hands the bytes over: what it would answer to others names our insides.
    return grpc.unary_unary_rpc_method_handler(call)


def _stream_handler(method: Stream, streams: Streams, calls: Calls) -> grpc.RpcMethodHandler:
    async def call(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await calls.begin(context)

        async def receive() -> bytes | None:
            message = await context.read()
            return None if message is grpc.aio.EOF else message

        async def send(answer: bytes) -> None:
            try:
                await context.write(answer)
            except grpc.aio.InternalError:  # the client left, which comes before we are cancelled for it
                raise asyncio.CancelledError from None

        with streams.open() as lifetime:
            try:
                await method(receive, send, lifetime)
            except Closing as closing:
                # A stream that ends well would let clients wait for answers to what they still send.
                end = Unavailable("stream", ENDS[closing.reason], "a new stream, to another server or later")
                await context.abort(STATUS[Unavailable], str(end))

    return grpc.stream_stream_rpc_method_handler(call)


@asynccontextmanager
async def running(
    engine: Engine, streams: Streams, sequences: Sequences, version: str, settings: Settings
) -> AsyncIterator[None]:
    """Serve gRPC while the block runs; requests in flight are finished at its end, and streams are told of it."""
    service, calls = InferenceService(engine, sequences, version), Calls()
    handlers = {}
    for described in pb.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods:
        method = getattr(service, described.name)
        handlers[described.name] = (
            _stream_handler(method, streams, calls)
            if described.client_streaming
            else _handler(method, getattr(pb, described.input_type.name), engine, calls)
        )
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            # What does not fit into a message of gRPC is refused before, by name.
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(settings.workers > 1)),
        ]
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    healths = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    server.add_insecure_port(f"{host}:{settings.grpc_port}")
    for name in ("", SERVICE):
        await healths.set(name, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    try:
        yield
    finally:
        await healths.enter_graceful_shutdown()
        streams.drain()
        await calls.finish(server, GRACE_SECONDS)
