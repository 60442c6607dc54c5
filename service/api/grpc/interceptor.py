"""A call of gRPC as its span tells it, by the semantic conventions of OpenTelemetry."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from preblock.service.api.grpc.errors import metadata_of, visit_of
from preblock.service.observability.context import Begin

FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Statuses that are errors of the server."""


class TracingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Traces the calls of a service, a stream as one span.

    Args:
        begin: traces.
        service: beginning of the paths of its calls.
        left_out: beginnings of the paths without traces.

    """

    def __init__(self, begin: Begin, service: str, left_out: tuple[str, ...]) -> None:
        self._begin, self._service, self._left_out = begin, service, left_out

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        """Return the handler of a call, with tracing."""
        handler = await continuation(call)
        if handler is None or not call.method.startswith(self._service) or call.method.startswith(self._left_out):
            return handler
        answer = handler.stream_stream if handler.request_streaming else handler.unary_unary

        async def traced(message: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._traced(call.method.removeprefix("/"), context):
                return await answer(message, context)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(traced)
        return grpc.unary_unary_rpc_method_handler(traced)

    @contextmanager
    def _traced(self, method: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        said = {"rpc.system.name": "grpc", "rpc.method": method}
        trace, code = self._begin(visit_of(context), metadata_of(context), method, said), None
        try:
            yield
        except asyncio.CancelledError:  # by the client, or its deadline; no code says so
            code = grpc.StatusCode.CANCELLED
            raise
        finally:
            code = code or context.code() or grpc.StatusCode.OK
            trace.attributes["rpc.response.status_code"] = code.name
            trace.failed = trace.failed or code in FAULTS
            if code is not grpc.StatusCode.OK:
                trace.attributes.setdefault("error.type", code.name)
            trace.end()
