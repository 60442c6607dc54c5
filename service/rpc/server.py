"""The door of the Open Inference Protocol over gRPC."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from incipit.service.engine import Engine
from incipit.service.errors import UNFORESEEN, IncipitError
from incipit.service.rpc.status import STATUS
from incipit.service.settings import Settings
from incipit.service.wire import open_inference_pb2 as pb
from incipit.service.wire.open_inference import model_metadata
from incipit.service.wire.protobuf import read, read_infer, write_infer, write_metadata

SERVICE = "inference.GRPCInferenceService"
GRACE_SECONDS = 10
LOG = logging.getLogger(__name__)

Method = Callable[[Any], Awaitable[Any]]


class InferenceService:
    """The methods of the service, named as published."""

    def __init__(self, engine: Engine, version: str) -> None:
        self._engine = engine
        self._version = version

    async def ServerLive(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Answer as long as the process does."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Say whether every model has run once."""
        return pb.ServerReadyResponse(ready=self._engine.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Say whether a model is served."""
        self._engine.repository.find(request.name, request.version)
        return pb.ModelReadyResponse(ready=self._engine.ready)

    async def ServerMetadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Return name and version of the server."""
        return pb.ServerMetadataResponse(name="incipit", version=self._version)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """Return inputs and outputs of a model."""
        model = self._engine.repository.find(request.name, request.version)
        versions = [model.version] if request.version else self._engine.repository.versions(model.name)
        return write_metadata(model_metadata(model.name, versions, model.manifest))

    async def ModelInfer(self, request: pb.ModelInferRequest) -> bytes:
        """Return the outputs asked for, `embeddings` by default; inputs other than `input_ids` may be left out."""
        with self._engine.metrics.request("grpc") as observation:
            model = self._engine.repository.find(request.model_name, request.model_version)
            observation.model = model.name
            schedule = self._engine.scheduler.run
            embed = await schedule(request.ByteSize(), lambda: read_infer(request, model.manifest))
            answer = await self._engine.answer(model, embed)
            return await schedule(answer.size, lambda: write_infer(answer, request.id).SerializeToString())


def _handler(method: Method, request: Any, engine: Engine) -> grpc.RpcMethodHandler:
    async def call(message: bytes, context: grpc.aio.ServicerContext) -> bytes:
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


@asynccontextmanager
async def running(engine: Engine, version: str, settings: Settings) -> AsyncIterator[None]:
    """Serve gRPC while the block runs; requests in flight are finished at its end."""
    service = InferenceService(engine, version)
    methods = {
        method.name: _handler(getattr(service, method.name), getattr(pb, method.input_type.name), engine)
        for method in pb.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods
    }
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(settings.workers > 1)),
        ]
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    server.add_insecure_port(f"{host}:{settings.grpc_port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(GRACE_SECONDS)
