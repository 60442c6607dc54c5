"""Errors of text-embeddings-inference; the kinds are those of `ErrorType` in its OpenAPI document, version 1.8."""

from preblock.service.codecs.tei import error_document
from preblock.service.core.errors import Invalid, Malformed, ProviderError, RateLimited, Unavailable


def test_error_has_kind_and_fields_of_the_api() -> None:
    for error, kind, message in (
        (Malformed("inputs", "''", "a text"), "Empty", "inputs: got ''"),
        (Malformed("body", "x", "JSON"), "Validation", "body: got x"),
        (Invalid("input_ids[1]", -1, "0 to 9"), "Validation", "inputs[1]: got -1, expected 0 to 9"),
        (RateLimited("requests", "9", "fewer"), "Overloaded", "requests"),
        (Unavailable("queue", "64 waiting", "fewer"), "Unhealthy", "queue"),
        (ProviderError("provider", "cuda", "cpu"), "Backend", "provider"),
    ):
        document = error_document(error)
        assert (document["error_type"], document["error"].startswith(message)) == (kind, True)
