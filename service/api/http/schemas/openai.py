"""The bodies of the OpenAI API."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from preblock.service.api.http.negotiation import JSON
from preblock.service.api.http.schemas.common import (
    Documented,
    Dtype,
    ListError,
    Pooling,
    RequestBody,
    Rows,
    SpecialTokensInText,
    Texts,
    Truncate,
    describe_body,
    describe_errors,
    describe_operation,
)

IGNORED = Field(None, description="Ignored, and listed in the response header Preblock-Ignored.")


class EmbeddingsRequest(RequestBody):
    """Fields of the OpenAI API, additions of vLLM and of Preblock, and from `user` on the ignored fields."""

    model: str = Field(min_length=1, description="`name`, or `name:version`.")
    input: Texts | Rows
    encoding_format: Literal["float", "base64"] | None = Field("float", description="How JSON holds the vectors.")
    dimensions: int | None = Field(
        None, ge=1, description="Columns of a sentence embedding to keep; other models accept their width only."
    )
    pooling: Pooling | None = Field(
        None,
        description="Reduction of the token vectors to one vector; none returns a vector for each token. Default mean "
        "for a static embedding model; required for every other model, which has no sentence embeddings.",
    )
    truncate: Truncate | None = Field(None, description="Side on which a too long input is cut; default is an error.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Most tokens of an input; -1 for the limit of the model. Cuts on the right by default."
    )
    truncation_side: Truncate | None = Field(None, description="Side of `truncate_prompt_tokens`, which it needs.")
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds its special tokens to a text; default true, false for a static model.",
    )
    special_tokens_in_text: SpecialTokensInText | None = "allow"
    use_activation: bool | None = Field(
        None, description="Whether each pooled vector is divided by its Euclidean norm; default as the model states it."
    )
    embed_dtype: Dtype | None = Field("float32", description="Type of the values in base64.")
    endianness: Literal["native", "little"] | None = Field("native", description="Always little-endian.")
    user: Any = IGNORED
    input_type: Any = IGNORED
    metadata: Any = IGNORED
    priority: Any = IGNORED
    request_id: Any = IGNORED
    cache_salt: Any = IGNORED
    mm_processor_kwargs: Any = IGNORED


class Embedding(Documented):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: str | list[Any] = Field(description="Numbers, or base64 of little-endian values.")
    shape: list[int] | None = Field(None, description="With pooling none: [tokens, width].")


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
    truncated: list[int] | None = Field(None, description="Tokens cut from each input, with truncate.")


class OpenAIModel(BaseModel):
    """A model in the list of the OpenAI API."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Time of the artifact, in seconds since 1970.")
    owned_by: str = "preblock"


class OpenAIModels(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[OpenAIModel]


class OpenAIErrorDetails(ListError):
    """Message, type, field and code of an error."""

    message: str
    type: Literal["invalid_request_error", "server_error", "requests", "max_tokens_per_request"]
    param: str | None = Field(description="The field.")
    code: str | None = Field(description="The code of OpenAI, such as context_length_exceeded; null without one.")


class OpenAIError(Documented):
    """An error of the OpenAI API."""

    error: OpenAIErrorDetails


MODEL_ERRORS = describe_errors(OpenAIError, JSON, 401, 403, 404, 503)
EMBEDDINGS = describe_operation(
    describe_body(EmbeddingsRequest, example={"model": "gpt2-small", "input": [[1, 2, 3], [4]], "pooling": "last"}),
    describe_body(EmbeddingsAnswer),
    describe_errors(OpenAIError, JSON, 400, 401, 403, 404, 413, 415, 429, 500, 503),
)
