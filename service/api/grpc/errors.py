"""Errors as gRPC statuses: the one place where kinds of error meet them."""

from collections.abc import Iterator
from typing import Any

import grpc

from preblock.service.core import errors
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext

STATUS: dict[type[errors.PreblockError], grpc.StatusCode] = {
    errors.Malformed: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Invalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnsupportedFormat: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotAcceptable: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.ArtifactError: grpc.StatusCode.INTERNAL,
    errors.ProviderError: grpc.StatusCode.INTERNAL,
}


async def abort(context: Any, error: errors.PreblockError) -> None:
    """End a call with an error; the metadata `retry-after` says after how many seconds it may succeed."""
    metadata = visit_of(context).metadata()
    if error.retry_after is not None:
        metadata += (("retry-after", str(error.retry_after)),)
    await context.abort(STATUS[type(error)], str(error), metadata)


def metadata_of(context: Any) -> Iterator[tuple[bytes, bytes]]:
    """Yield the text metadata of a call, as headers."""
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            yield name.encode(), value.encode()


def visit_of(context: Any) -> RequestContext:
    """Return the request context of a call; the first time, make it and send its id with the status of the call."""
    visit = CURRENT_REQUEST.get()
    if visit is None:
        visit = RequestContext.of(metadata_of(context))
        CURRENT_REQUEST.set(visit)
        context.set_trailing_metadata(visit.metadata())
    return visit
