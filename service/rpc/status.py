"""Errors as gRPC statuses: the one place where kinds of error meet them."""

import grpc

from incipit.service import errors

STATUS: dict[type[errors.IncipitError], grpc.StatusCode] = {
    errors.Malformed: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Invalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnsupportedFormat: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotAcceptable: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.ArtifactError: grpc.StatusCode.INTERNAL,
    errors.ProviderError: grpc.StatusCode.INTERNAL,
}
