"""The server of the Open Inference Protocol over gRPC, with the standard services for health and reflection."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from preblock.service.api.grpc.errors import abort, visit_of
from preblock.service.api.grpc.inflight import InflightCalls
from preblock.service.api.grpc.servicer import InferenceService, Receive, Send
from preblock.service.api.grpc.tracing import TracingInterceptor
from preblock.service.api.request_cache import TemplateCache
from preblock.service.api.streams import StreamEnd, StreamLifetime, StreamRegistry
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.codecs.v2.protobuf import read
from preblock.service.core.auth import Authenticator
from preblock.service.core.errors import INTERNAL_ERROR_MESSAGE, PreblockError, Unavailable
from preblock.service.core.settings import Settings
from preblock.service.core.tls import load_certificates
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import Sequences
from preblock.service.observability.context import Begin

SERVICE = "inference.GRPCInferenceService"
GRPC, GRPC_STREAM = "grpc", "grpc-stream"
ENDS = {
    "shutdown": "the end of the server while it waited",
    "idle": "nothing from its client for too long",
    "time": "more time than a stream may take",
    "key": "a key that was taken out or changed",
}
OPEN = (f"/{health.SERVICE_NAME}/", f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady")
"""Methods that need no key: an orchestrator that starts, stops and watches the service has none."""
LOG = logging.getLogger(__name__)

Method = Callable[[Any], Awaitable[Any]]
Stream = Callable[[Receive, Send, StreamLifetime], Awaitable[None]]


class _AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets in callers with a key, before any method runs."""

    def __init__(self, access: Authenticator) -> None:
        self._access = access

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Return the handler of a call: the method, or a refusal."""
        if call.method.startswith(OPEN):
            return await continuation(call)
        authorization = dict(call.invocation_metadata).get("authorization")
        try:
            self._access.authenticate(None if authorization is None else authorization.encode())
        except PreblockError as error:
            return _refusal(error, await continuation(call))
        return await continuation(call)


def _refusal(error: PreblockError, refused: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """Return a handler that answers every call of a method, unary or stream, with an error."""

    async def call(_: Any, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    if refused is None:  # an unknown method: gRPC answers it
        return None
    streams = refused.request_streaming
    return (grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler)(call)


def _name_caller(access: Authenticator, context: grpc.aio.ServicerContext) -> None:
    """Name a caller without a key by its address."""
    if not access.needs_key:
        host = unquote(context.peer()).rpartition(":")[0].partition(":")[2]  # of ipv4:127.0.0.1:5 or ipv6:[::1]:5
        access.identify(host.strip("[]"))


def _handler(method: Method, kind: Any, engine: Engine, calls: InflightCalls) -> grpc.RpcMethodHandler:
    """Return the handler of a unary method; it takes messages of a kind, or bytes where that is None."""
    schedule = engine.scheduler.run

    async def call(message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        visit = visit_of(context)
        await calls.begin(context)
        _name_caller(engine.repository.access, context)
        try:
            answer = await method(
                message if kind is None else await schedule(len(message), partial(read, kind, message))
            )
            written: bytes = answer if isinstance(answer, bytes) else answer.SerializeToString()
            engine.metrics.count_bytes(GRPC, len(message), len(written))
            context.set_trailing_metadata(visit.metadata())
            return written
        except PreblockError as error:
            await abort(context, error)
        except Exception:
            LOG.exception("a gRPC call failed in an unforeseen way")
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_ERROR_MESSAGE)

        raise AssertionError("abort raises")

    # Without a deserializer gRPC hands over the bytes: its own error for broken ones would name our internals.
    return grpc.unary_unary_rpc_method_handler(call)


def _stream_handler(
    method: Stream, streams: StreamRegistry, calls: InflightCalls, engine: Engine
) -> grpc.RpcMethodHandler:
    async def call(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        visit_of(context)
        await calls.begin(context)

        async def receive() -> bytes | None:
            message = await context.read()
            if message is grpc.aio.EOF:
                return None
            engine.metrics.count_bytes(GRPC_STREAM, len(message), 0)
            received: bytes = message
            return received

        async def send(answer: bytes) -> None:
            began = perf_counter()
            try:
                await context.write(answer)
                engine.metrics.count_bytes(GRPC_STREAM, 0, len(answer), 0, perf_counter() - began)
            except grpc.aio.InternalError:  # the client left; our cancellation follows
                raise asyncio.CancelledError from None

        _name_caller(engine.repository.access, context)
        try:
            with streams.open() as lifetime:
                await method(receive, send, lifetime)
        except Unavailable as error:
            await abort(context, error)
        except StreamEnd as closing:
            # After a good end, clients would wait for answers to their next messages.
            await abort(
                context, Unavailable("stream", ENDS[closing.reason], "a new stream, to another server or later")
            )

    return grpc.stream_stream_rpc_method_handler(call)


def _listen(server: grpc.aio.Server, address: str, settings: Settings) -> None:
    """Listen, with TLS if the settings have it."""
    files = load_certificates(settings)
    if files is None:
        server.add_insecure_port(address)
        return

    def read_files() -> grpc.ServerCertificateConfiguration:
        client_ca = None if files.client_ca is None else files.client_ca.read_bytes()
        pair = files.key.read_bytes(), files.certificate.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], client_ca)

    credentials = grpc.dynamic_ssl_server_credentials(
        read_files(), lambda: read_files() if files.changed() else None, files.client_ca is not None
    )
    server.add_secure_port(address, credentials)


@asynccontextmanager
async def running(
    engine: Engine,
    streams: StreamRegistry,
    sequences: Sequences,
    templates: TemplateCache,
    version: str,
    settings: Settings,
    trace: Begin | None,
) -> AsyncIterator[None]:
    """Serve gRPC while the block runs; requests in flight are finished at its end, and streams are told of it."""
    service, calls = InferenceService(engine, sequences, templates, version), InflightCalls()
    handlers = {}
    for described in pb.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods:
        method, kind = getattr(service, described.name), getattr(pb, described.input_type.name)
        handlers[described.name] = (
            _stream_handler(method, streams, calls, engine)
            if described.client_streaming
            else _handler(method, None if method == service.ModelInfer else kind, engine, calls)
        )
    access = engine.repository.access
    traces = () if trace is None else (TracingInterceptor(trace, f"/{SERVICE}/", OPEN),)
    server = grpc.aio.server(
        interceptors=(*traces, _AuthInterceptor(access)) if access.needs_key else traces,
        options=[
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            # A larger answer is refused before, with an error of its own.
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(settings.workers > 1)),
        ],
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    healths = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    _listen(server, f"{host}:{settings.grpc_port}", settings)
    for name in ("", SERVICE):
        await healths.set(name, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    try:
        yield
    finally:
        await healths.enter_graceful_shutdown()
        streams.drain()
        await calls.finish(server, settings.shutdown_timeout_seconds)
