"""Server reflection under the names of both its versions.

grpcio-reflection has `v1alpha` only. Newer clients ask for `v1` first; its messages are the same ones (gRPC,
"Server Reflection Protocol").
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from preblock.service.api.grpc.errors import SERVICE
from preblock.service.api.grpc.handlers import CallHandlers
from preblock.service.api.grpc.interceptor import CallInterceptor
from preblock.service.api.grpc.servicer import InferenceService
from preblock.service.api.streams import StreamRegistry
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.codecs.v2.protobuf import register_renamed
from preblock.service.core.auth import Authenticator
from preblock.service.core.settings import Settings
from preblock.service.core.tasks import start_task
from preblock.service.core.tls import load_certificates
from preblock.service.engine.engine import Engine
from preblock.service.engine.sequences import Sequences
from preblock.service.observability.context import Begin

V1_SERVICE = reflection.SERVICE_NAME.replace("v1alpha", "v1")


def _enable_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Make `server` describe `services` and the reflection services themselves."""
    register_renamed(reflection_pb2.DESCRIPTOR, "v1alpha", "v1")
    names = (*services, reflection.SERVICE_NAME, V1_SERVICE)
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1_SERVICE, handlers),))


HEALTH_INTERVAL_SECONDS = 1.0
MAX_OPTION = 2**31 - 1
"""Largest integer option of gRPC."""
MIN_PING_INTERVAL_MS = 5000
"""Clients ping every 10 seconds or more. With the default of 5 minutes the third ping on an idle stream ends it."""


def _listen(server: grpc.aio.Server, settings: Settings) -> None:
    """Listen, with TLS if the settings have it."""
    files, address = load_certificates(settings), settings.grpc_address
    assert address is not None
    if files is None:
        server.add_insecure_port(address)
        return

    def read_files() -> grpc.ServerCertificateConfiguration:
        client_ca = None if files.client_ca is None else files.client_ca.read_bytes()
        pair = files.key.read_bytes(), files.certificate.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], client_ca)

    changed = deque[grpc.ServerCertificateConfiguration](maxlen=1)
    files.watch(read_files, changed.append)
    # The library calls the function in each handshake, from a thread of its own.
    credentials = grpc.dynamic_ssl_server_credentials(
        read_files(), lambda: changed.pop() if changed else None, files.client_ca is not None
    )
    server.add_secure_port(address, credentials)


async def _set_health(statuses: health.aio.HealthServicer, engine: Engine) -> None:
    """Report whether a model is served."""
    states = health_pb2.HealthCheckResponse
    for name in ("", SERVICE):
        await statuses.set(name, states.SERVING if engine.repository.is_ready else states.NOT_SERVING)


async def _report_health(statuses: health.aio.HealthServicer, engine: Engine) -> None:
    """Report the first model of a repository that was empty at the start, until cancelled."""
    while True:
        await asyncio.sleep(HEALTH_INTERVAL_SECONDS)
        await _set_health(statuses, engine)


def _create_server(settings: Settings, access: Authenticator, trace: Begin | None) -> grpc.aio.Server:
    """Create the server, without its methods and its address."""
    lifetime_ms, idle_ms = 1000 * settings.stream_max_lifetime_seconds, 1000 * settings.stream_idle_timeout_seconds
    return grpc.aio.server(
        interceptors=[CallInterceptor(access, trace)] if access.needs_key or trace is not None else [],
        options=[
            ("grpc.max_receive_message_length", min(settings.max_body_bytes, MAX_OPTION)),
            # The codec rejects a larger response, with its own error.
            ("grpc.max_send_message_length", -1),
            # With its probes the library receives whole messages before the service reads them.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.so_reuseport", int(settings.workers > 1)),
            ("grpc.server_handshake_timeout_ms", min(1000 * settings.header_timeout_seconds, MAX_OPTION)),
            ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
            # Without it the interval of a connection without calls is two hours.
            ("grpc.keepalive_permit_without_calls", 1),
            # No other limit ends a stream whose client does not read. Calls move to a new connection after this age,
            # and the grace period is enough for a stream of the full lifetime.
            ("grpc.max_connection_age_ms", min(lifetime_ms, MAX_OPTION)),
            ("grpc.max_connection_age_grace_ms", min(lifetime_ms + idle_ms, MAX_OPTION)),
        ],
    )


@asynccontextmanager
async def running(
    engine: Engine,
    streams: StreamRegistry,
    sequences: Sequences,
    version: str,
    settings: Settings,
    trace: Begin | None,
) -> AsyncIterator[None]:
    """Serve gRPC while the block runs. At its end, streams get a close message, and requests in flight finish."""
    service, calls = InferenceService(engine, sequences, version), CallHandlers(engine, streams)
    handlers = {}
    for described in pb.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods:
        method = getattr(service, described.name)
        kind, answer_kind = (getattr(pb, message.name) for message in (described.input_type, described.output_type))
        handlers[described.name] = (
            calls.stream(method)
            if described.client_streaming
            else calls.unary(method, None if method == service.ModelInfer else kind, answer_kind)
        )
    server = _create_server(settings, engine.repository.access, trace)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    statuses = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    _enable_reflection(server, (SERVICE, health.SERVICE_NAME))
    _listen(server, settings)
    await _set_health(statuses, engine)
    reporting = start_task(partial(_report_health, statuses, engine))
    await server.start()
    try:
        yield
    finally:
        reporting.cancel()
        await statuses.enter_graceful_shutdown()
        streams.drain()
        await calls.drain(server, settings.shutdown_timeout_seconds)
