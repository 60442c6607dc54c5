"""The bodies of text-embeddings-inference."""

from typing import Literal

from pydantic import BaseModel, Field

from preblock.service.api.http.negotiation import JSON
from preblock.service.api.http.schemas.common import (
    Documented,
    ListError,
    OpenAPI,
    Rows,
    SpecialTokensInText,
    Texts,
    describe_body,
    describe_errors,
    describe_operation,
    refer_to,
)


class TokenVectorsRequest(Documented):
    """Fields of `/embed_all`; other fields are ignored, and listed in the response header Preblock-Ignored."""

    inputs: Texts | Rows
    truncate: bool | None = Field(False, description="Whether too long inputs are cut; false: they are an error.")
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = Field("right", description="Side to cut.")
    special_tokens_in_text: SpecialTokensInText | None = "allow"


class SentenceRequest(TokenVectorsRequest):
    """Fields of `/embed`; other fields are ignored, and listed in the response header Preblock-Ignored."""

    normalize: bool | None = Field(True, description="Whether each vector is divided by its Euclidean norm.")
    dimensions: int | None = Field(None, ge=1, description="Leading columns to keep, before the normalization.")


class TokenizeRequest(Documented):
    """Fields of `/tokenize`; other fields are ignored, and listed in the response header Preblock-Ignored."""

    inputs: Texts
    special_tokens_in_text: SpecialTokensInText | None = "allow"
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds its special tokens to a text; default true, false for a static model.",
    )


class TextToken(Documented):
    """A token of a text."""

    id: int
    text: str | None = Field(description="Its characters in the text; the spelling of a special token.")
    special: bool = Field(description="Whether the tokenizer added it to the text.")
    start: int | None = Field(description="Its first character in the text; null for a special token.")
    stop: int | None = Field(description="The character after its last one; null for a special token.")


class Info(BaseModel):
    """The model and the limits of the server."""

    model_id: str
    model_sha: str = Field(description="Identity of the artifact.")
    model_dtype: str = "float32"
    model_type: dict[str, dict[str, str]] = Field(description="Pooling of the sentence embedding; none without one.")
    max_concurrent_requests: int
    max_input_length: int = Field(description="Most tokens of an input.")
    max_batch_tokens: int = Field(description="Most tokens of a request.")
    max_client_batch_size: int = Field(description="Most inputs of a request.")
    auto_truncate: bool = Field(False, description="Inputs are cut on request only.")
    tokenization_workers: int = Field(description="Number of serving processes.")
    version: str = Field(description="Of Preblock.")


class SentenceError(ListError):
    """An error of text-embeddings-inference."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


def _lists(items: OpenAPI, depth: int) -> OpenAPI:
    """Return the schema of nested lists of `items`."""
    return {"type": "array", "items": _lists(items, depth - 1)} if depth else items


REFUSALS = describe_errors(SentenceError, JSON, 401, 403, 404, 422, 503)
ERRORS = REFUSALS | describe_errors(SentenceError, JSON, 400, 413, 415, 429, 500)
EMBED = describe_operation(
    describe_body(SentenceRequest, example={"inputs": [[1, 2, 3], [4]]}),
    {JSON: {"schema": _lists({"type": "number"}, 2)}},
    ERRORS,
)
EMBED_ALL = describe_operation(
    describe_body(TokenVectorsRequest, example={"inputs": [[1, 2, 3], [4]]}),
    {JSON: {"schema": _lists({"type": "number"}, 3)}},
    ERRORS,
)
TOKENIZE = describe_operation(
    describe_body(TokenizeRequest, example={"inputs": "hello world"}),
    {JSON: {"schema": _lists(refer_to(TextToken), 2)}},
    ERRORS,
)
