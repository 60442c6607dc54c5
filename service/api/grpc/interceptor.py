"""Authentication and tracing of gRPC calls, with span attributes by the semantic conventions of OpenTelemetry."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import grpc
from grpc_health.v1 import health

from preblock.service.api.grpc.errors import SERVICE, context_of, fail, headers_of
from preblock.service.core.auth import Authenticator
from preblock.service.core.errors import PreblockError
from preblock.service.observability.context import Begin

OPEN = (f"/{health.SERVICE_NAME}/", f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady")
"""Methods without authentication and spans: the health probes of an orchestrator have no key."""
SERVER_ERRORS = frozenset(
    (
        *(grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED),
        *(grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS),
    )
)
"""Statuses of spans with a fault of the server."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Authenticates all calls, and traces those of the inference service; a stream has one span.

    Args:
        access: authenticates callers.
        begin: starts spans; None without tracing.

    """

    def __init__(self, access: Authenticator, begin: Begin | None) -> None:
        self._access, self._begin = access, begin

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Return the handler of a call, or a handler for its rejection."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN):  # gRPC itself rejects an unknown method
            return handler
        error = self._authenticate(details)
        begin = self._begin if details.method.startswith(f"/{SERVICE}/") else None
        if error is None and begin is None:
            return handler
        streaming = handler.response_streaming
        answer = handler.stream_stream if streaming else handler.stream_unary

        async def run(messages: Any, call: grpc.aio.ServicerContext) -> Any:
            with nullcontext() if begin is None else _span(begin, details.method.removeprefix("/"), call):
                if error is not None:
                    fail(call, error)
                    return None
                return await answer(messages, call)

        return (grpc.stream_stream_rpc_method_handler if streaming else grpc.stream_unary_rpc_method_handler)(run)

    def _authenticate(self, details: Any) -> PreblockError | None:
        """Set the caller of this call from its key; return an error without a known key."""
        authorization = dict(details.invocation_metadata).get("authorization")
        try:
            if self._access.needs_key:
                self._access.authenticate(None if authorization is None else authorization.encode())
        except PreblockError as error:
            return error
        return None


@contextmanager
def _span(begin: Begin, method: str, call: grpc.aio.ServicerContext) -> Iterator[None]:
    """Trace a call for as long as the block runs."""
    attributes = {"rpc.system.name": "grpc", "rpc.method": method}
    trace, code = begin(context_of(call), headers_of(call), method, attributes), None
    try:
        yield
    except asyncio.CancelledError:  # by the client or its deadline; the call has no status then
        code = grpc.StatusCode.CANCELLED
        raise
    finally:
        code = code or call.code() or grpc.StatusCode.OK
        trace.attributes["rpc.response.status_code"] = code.name
        trace.failed = trace.failed or code in SERVER_ERRORS
        if code is not grpc.StatusCode.OK:
            trace.attributes.setdefault("error.type", code.name)
        trace.end()
