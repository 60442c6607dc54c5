"""The bodies of the native APIs."""

from typing import Any, Literal

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from preblock.service.api.http.errors import MEDIA_TYPE
from preblock.service.api.http.negotiation import BYTES, EVENTS, NDJSON, NPY, SAFETENSORS
from preblock.service.api.http.schemas.common import (
    ANSWER,
    BINARY,
    Documented,
    Rows,
    Texts,
    Truncate,
    described,
    errors,
)
from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.parity import ParityReport


class EmbedRequest(Documented):
    """Token ids and what belongs to them."""

    input_ids: Rows | None = Field(
        None,
        description="Rows of token ids, which may differ in length; a flat list is one row. Required without text.",
    )
    text: Texts | None = Field(
        None, description="Instead of input_ids, for a model with a tokenizer: a text for each row."
    )
    offset: int | list[int] = Field(0, description="Real tokens already fed: one number, or one for each row.")
    position_ids: Rows | None = Field(None, description="Position index of each token; excludes offset.")
    token_type_ids: Rows | None = Field(
        None, description="Segment of each token; default 0. Further inputs of a model stand beside it by name."
    )
    attention_mask: Rows | None = Field(None, description="1 for a real token, 0 for padding; default 1.")
    truncate: Truncate | None = Field(None, description="Where a row that is too long is cut; default is an error.")
    output: str | list[str] = Field("embeddings", description="Which output, or several, in JSON or safetensors.")
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    encoding: Literal["base64", "float", "prompt_embeds"] = Field(
        "base64", description="How JSON holds the vectors; prompt_embeds is what vLLM takes, of token_embeddings alone."
    )
    return_tokens: bool = Field(False, description="Whether the answer says what the tokens of a text are.")


class OutputDescription(Documented):
    """One of several outputs."""

    shape: list[int]
    data: str | list[Any]


class EmbedAnswer(Documented):
    """The vectors that enter block 0, or another output under its own name, or several in `outputs`."""

    model: str
    version: int
    dtype: Literal["float32", "float16", "bfloat16"]
    encoding: Literal["base64", "float", "prompt_embeds"]
    shape: list[int] | None = Field(None, description="[B, L, D] where all rows have one length, else [T, D].")
    embeddings: str | list[Any] | None = Field(None, description="Base64 of little-endian bytes, or nested lists.")
    token_embeddings: str | list[Any] | None = Field(
        None, description="The same of the model's own lookup; as prompt_embeds a file for each row, in base64."
    )
    outputs: dict[str, OutputDescription] | None = Field(
        None, description="Where several were asked for: each by its name."
    )
    next_offset: list[int] = Field(description="For each row, the offset that continues it.")
    lengths: list[int] | None = Field(None, description="Tokens of each row, where they differ.")
    truncated: list[int] | None = Field(None, description="Tokens cut of each row, where that was allowed.")
    input_ids: list[list[int]] | None = Field(None, description="Of a text, where asked for: its tokens.")
    spans: list[list[tuple[int, int]]] | None = Field(
        None, description="Of each token: its first character in the text, and the one after its last."
    )


class BiasRequest(Documented):
    """Which queries meet which keys: queries from a position on, keys from position 0 on."""

    model_config = ConfigDict(extra="forbid")

    query_length: int
    key_length: int
    query_offset: int = Field(0, description="Keys that were fed before the first query.")
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    encoding: Literal["base64", "float"] = Field("base64", description="How JSON holds the values.")


class BiasAnswer(Documented):
    """What attention adds for each head, query and key; or the sinusoid of each distance."""

    model: str
    version: int
    dtype: Literal["float32", "float16", "bfloat16"]
    encoding: Literal["base64", "float"]
    shape: list[int] = Field(description="[1, H, Q, K]; of a sinusoid [rows, D].")
    bias: str | list[Any] | None = Field(None, description="Base64 of little-endian bytes, or nested lists.")
    relative_positions: str | list[Any] | None = Field(None, description="The same of a sinusoid.")


class Problem(Documented):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    got: str | None = None
    allowed: str | None = None
    request_id: str | None = Field(None, description="What X-Request-Id says; none in a stream.")


class ProviderDescription(BaseModel):
    """Where models run, and why."""

    requested: str = Field(description="What the settings say: auto, cpu or cuda.")
    active: str = Field(description="The onnxruntime provider that really runs.")
    probed: str | None = Field(
        description="The one on which a session ran that was opened to try CUDA; null where none was."
    )
    reason: str | None = Field(description="Why CUDA is not used where it was tried.")


class ModelDescription(BaseModel):
    """A model as it is served."""

    name: str
    version: int
    identity: str = Field(description="SHA-256 of the manifest, which holds the hashes of the files.")
    versions: list[int]
    provider: str = Field(description="The onnxruntime provider that really runs.")
    provider_choice: ProviderDescription
    max_len: int | None = Field(description="The largest legal offset + real tokens; null where nothing limits it.")
    max_tokens: int = Field(description="Most tokens of one request.")
    manifest: Manifest | StemManifest
    parity: ParityReport


PROBLEMS = errors(Problem, MEDIA_TYPE, 400, 401, 403, 404, 406, 413, 415, 422, 429, 500, 503)
NOT_FOUND = errors(Problem, MEDIA_TYPE, 401, 403, 404)
ARRAYS = {BYTES: BINARY, NPY: BINARY, SAFETENSORS: BINARY}
BESIDE: list[dict[str, Any]] = [
    {
        "name": "shape",
        "in": "query",
        "description": "Of a body of raw int64: its sizes, such as 2,3; without it one row.",
        "schema": {"type": "string"},
    },
    {
        "name": "lengths",
        "in": "query",
        "description": "Of rows that stand one after another in a body of arrays: how long each is, such as [3,1].",
        "schema": {"type": "string"},
    },
]
EMBED: dict[str, Any] = {
    "responses": {
        200: {"description": ANSWER, "content": {**described(EmbedAnswer), **ARRAYS}},
        **PROBLEMS,
    },
    "openapi_extra": {
        "parameters": BESIDE,
        "requestBody": {"required": True, "content": {**described(EmbedRequest), **ARRAYS}},
    },
}
BIAS: dict[str, Any] = {
    "responses": {200: {"description": ANSWER, "content": {**described(BiasAnswer), **ARRAYS}}, **PROBLEMS},
    "openapi_extra": {"requestBody": {"required": True, "content": described(BiasRequest)}},
}


class DecodeRequest(Documented):
    """A known list of ids, answered as events; as lines, each message of `docs/decode.md` stands alone."""

    input_ids: Rows = Field(description="Rows of token ids, which may differ in length; a flat list is one row.")
    chunk: int = Field(1, description="Tokens of each row in one event.")
    offset: int | list[int] = Field(0, description="Real tokens already fed: one number, or one for each row.")
    rows: int | None = Field(None, description="Number of rows; default those of input_ids.")
    position_ids: Rows | None = Field(None, description="Position index of each token.")
    token_type_ids: Rows | None = Field(
        None, description="Segment of each token; default 0. Further inputs of a model stand beside it by name."
    )
    attention_mask: Rows | None = Field(None, description="1 for a real token, 0 for padding; default 1.")
    output: str | list[str] = Field("embeddings", description="Which output, or several.")
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    encoding: Literal["base64", "float"] = Field("base64", description="How JSON holds the vectors.")


TEXT: dict[str, Any] = {"schema": {"type": "string"}}
DECODE: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {"description": "Answers as they are ready.", "content": {NDJSON: TEXT, EVENTS: TEXT}},
        **PROBLEMS,
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {NDJSON: TEXT, **described(DecodeRequest)},
        }
    },
}
