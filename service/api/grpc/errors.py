"""gRPC statuses of errors, and the request context of a call."""

from collections.abc import Iterator
from typing import Any

import grpc

from preblock.service.core import errors
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext

SERVICE = "inference.GRPCInferenceService"
STATUS: dict[type[errors.PreblockError], grpc.StatusCode] = {
    errors.Malformed: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Invalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.Misdirected: grpc.StatusCode.PERMISSION_DENIED,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnsupportedFormat: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotAcceptable: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.ArtifactError: grpc.StatusCode.INTERNAL,
    errors.ProviderError: grpc.StatusCode.INTERNAL,
}


def fail(call: Any, error: errors.PreblockError) -> grpc.StatusCode:
    """Set the status of a call, and return it.

    The metadata `retry-after` is the number of seconds until a retry. `bad-indices`, in JSON, and `bad-count` are the
    fields of an HTTP error about items of a list.

    The handler then returns. `abort` raises an exception, which the call keeps, with the message in its frames: such a
    cycle would keep 16 MiB until the next garbage collection.
    """
    metadata = context_of(call).metadata()
    if error.retry_after is not None:
        metadata += (("retry-after", str(error.retry_after)),)
    if error.item_fields:
        metadata += (("bad-indices", str(error.bad_indices)), ("bad-count", str(len(error.items))))
    call.set_trailing_metadata(metadata)
    status = STATUS[type(error)]
    call.set_code(status)
    call.set_details(str(error))
    return status


def headers_of(call: Any) -> Iterator[tuple[bytes, bytes]]:
    """Yield the text metadata of a call as headers."""
    for name, value in call.invocation_metadata() or ():
        if isinstance(value, str):
            yield name.encode(), value.encode()


def context_of(call: Any) -> RequestContext:
    """Return the request context of a call. The first use makes it, and adds its id to the trailing metadata."""
    context = CURRENT_REQUEST.get()
    if context is None:
        context = RequestContext.of(headers_of(call))
        CURRENT_REQUEST.set(context)
        call.set_trailing_metadata(context.metadata())
    return context
