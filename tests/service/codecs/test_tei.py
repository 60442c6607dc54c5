"""Errors of text-embeddings-inference; the kinds are those of `ErrorType` in its OpenAPI document, version 1.8."""

from preblock.service.codecs.tei import error_document
from preblock.service.core.errors import ProviderError, RateLimited, Unavailable


def test_error_of_the_server_has_its_kind() -> None:
    for error, kind in ((RateLimited, "Overloaded"), (Unavailable, "Unhealthy"), (ProviderError, "Backend")):
        assert error_document(error("requests", "9", "fewer"))["error_type"] == kind
