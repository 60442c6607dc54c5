"""The bodies of the API of OpenAI."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from preblock.service.api.http.negotiation import JSON
from preblock.service.api.http.schemas.common import (
    Documented,
    RequestBody,
    Rows,
    Texts,
    Truncate,
    describe_body,
    describe_errors,
    describe_operation,
)


class EmbeddingsRequest(RequestBody):
    """Inputs, as the API of OpenAI has them; `pooling` and `truncate` are additions to it."""

    model: str = Field(description="`name`, or `name:version`.")
    input: Texts | Rows
    encoding_format: Literal["float", "base64"] = Field("float", description="How JSON holds the vectors.")
    dimensions: int | None = Field(None, description="The width of the model, or nothing.")
    user: str | None = Field(None, description="Not used.")
    pooling: Literal["none", "mean", "first", "last"] = Field(
        "mean", description="What becomes of the vectors of an input: one vector, or with none one for each token."
    )
    truncate: Truncate | None = Field(None, description="Where an input that is too long is cut; default is an error.")


class Embedding(Documented):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: str | list[Any] = Field(description="Numbers, or base64 of little-endian float32.")
    shape: list[int] | None = Field(None, description="With the pooling none: [tokens, width].")


class Usage(Documented):
    """How many tokens were embedded."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Documented):
    """The vectors of all inputs."""

    object: Literal["list"]
    model: str
    version: int
    data: list[Embedding]
    usage: Usage
    truncated: list[int] | None = Field(None, description="Tokens cut of each input, where that was allowed.")


class OpenAIModel(BaseModel):
    """A model, as the API of OpenAI lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When its artifact was written, in seconds since 1970.")
    owned_by: str = "preblock"


class OpenAIModels(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[OpenAIModel]


class OpenAIErrorDetails(Documented):
    """What is wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = Field(description="The field.")
    code: str | None = Field(description="The kind of error.")


class OpenAIError(Documented):
    """An error, as the API of OpenAI has it."""

    error: OpenAIErrorDetails


NOT_FOUND = describe_errors(OpenAIError, JSON, 401, 403, 404)
EMBEDDINGS = describe_operation(
    describe_body(EmbeddingsRequest),
    describe_body(EmbeddingsAnswer),
    describe_errors(OpenAIError, JSON, 400, 401, 403, 404, 413, 415, 422, 429, 500, 503),
)
