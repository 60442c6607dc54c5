"""Errors as gRPC statuses: the one place where kinds of error meet them."""

from typing import Any

import grpc

from incipit.service import errors

STATUS: dict[type[errors.IncipitError], grpc.StatusCode] = {
    errors.Malformed: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Invalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooMany: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnsupportedFormat: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotAcceptable: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.ArtifactError: grpc.StatusCode.INTERNAL,
    errors.ProviderError: grpc.StatusCode.INTERNAL,
}


async def abort(context: Any, error: errors.IncipitError) -> None:
    """End a call with an error; the metadata `retry-after` says after how many seconds it may succeed."""
    metadata = () if error.retry_after is None else (("retry-after", str(error.retry_after)),)
    await context.abort(STATUS[type(error)], str(error), metadata)
