"""The bodies of `/embed` of text-embeddings-inference."""

from typing import Literal

from pydantic import Field

from preblock.service.api.http.negotiation import JSON
from preblock.service.api.http.schemas.common import (
    ListError,
    OpenAPI,
    RequestBody,
    Rows,
    SpecialTokensInText,
    Texts,
    Truncate,
    describe_body,
    describe_errors,
    describe_operation,
)


class SentenceRequest(RequestBody):
    """Fields of text-embeddings-inference."""

    inputs: Texts | Rows
    truncate: bool | None = Field(False, description="Whether too long inputs are cut; false: they are an error.")
    truncation_direction: Truncate | None = Field("right", description="Side to cut.")
    normalize: bool | None = Field(True, description="Whether each vector is divided by its Euclidean norm.")
    dimensions: int | None = Field(None, ge=1, description="Leading columns to keep, before the normalization.")
    special_tokens_in_text: SpecialTokensInText | None = "allow"


class SentenceError(ListError):
    """An error of text-embeddings-inference."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


VECTORS: OpenAPI = {"schema": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}}
EMBED = describe_operation(
    describe_body(SentenceRequest, example={"inputs": [[1, 2, 3], [4]]}),
    {JSON: VECTORS},
    describe_errors(SentenceError, JSON, 400, 401, 403, 404, 413, 415, 422, 429, 500, 503),
)
