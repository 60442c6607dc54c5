"""The bodies of the native APIs."""

from typing import Any, Literal

from fastapi.responses import Response
from pydantic import BaseModel, Field

from preblock.service.api.http.errors import MEDIA_TYPE
from preblock.service.api.http.negotiation import BYTES, EVENTS, NDJSON, NPY, SAFETENSORS
from preblock.service.api.http.schemas.common import (
    BINARY,
    Documented,
    Dtype,
    ListError,
    Masks,
    Natural,
    OpenAPI,
    Pooling,
    RequestBody,
    Row,
    Rows,
    SpecialTokensInText,
    TableDtype,
    TensorDtype,
    Text,
    Texts,
    Truncate,
    describe_body,
    describe_errors,
    describe_operation,
    describe_parameter,
)
from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.parity import ParityReport
from preblock.service.engine.tables import DEFAULT_NEIGHBOURS, DEFAULT_POSITIONS, MAX_NEIGHBOURS, MAX_POSITIONS

Encoding = Literal["base64", "float"]
Values = str | list[Any] | None


class TokenFields(Documented):
    """Inputs of each token, and options of the answer."""

    offset: Natural | Row | None = Field(0, description="Real tokens already fed: one number, or one for each row.")
    context: Rows | None = Field(
        None, description="The last ids before each row, for ngram_embeddings; required at an offset above 0."
    )
    token_type_ids: Rows | None = Field(
        None, description="Segment of each token; default 0. Further inputs of a model are fields beside it."
    )
    attention_mask: Masks | None = Field(None, description="1 for a real token, 0 for padding; default 1.")
    output: str | list[str] | None = Field(
        "embeddings", description="One output, or several, as JSON or safetensors only."
    )
    dtype: TableDtype | None = "float32"


class PartObject(RequestBody):
    """A part of a row: token ids, a text, vectors, or a soft prompt."""

    input_ids: Row | None = None
    text: Text | None = Field(None, description="Without special tokens.")
    vectors: str | None = Field(None, description="Base64 of float32 values, in place of token vectors.")
    soft_prompt: str | None = Field(None, description="Name of a soft prompt of the model.")


class PlaceholderObject(RequestBody):
    """A token of the parts, and the vectors in its places, in order."""

    token_id: int
    vectors: str = Field(description="Base64 of float32 values.")


class EmbedRequest(TokenFields):
    """Token ids, or texts, and their options."""

    input_ids: Rows | None = Field(
        None, description="Rows of token ids of any lengths; a flat list is one row. Required without text."
    )
    position_ids: Rows | list[Rows] | None = Field(
        None,
        description="Position index of each token; it excludes offset, unless it has three lists of rows: for time, "
        "height and width.",
    )
    position_rows: Rows | None = Field(
        None, description="Instead of position_ids: row of the position table of each token, position + first_row."
    )
    text: Texts | None = Field(
        None, description="Instead of input_ids, for a model with a tokenizer: a text for each row."
    )
    parts: list[list[PartObject]] | list[PartObject] | None = Field(
        None, description="Instead of input_ids: a list of parts for each row; a flat list is one row."
    )
    placeholder: PlaceholderObject | None = Field(None, description="With parts: a token that stands for vectors.")
    truncate: Truncate | None = Field(None, description="Side on which a too long row is cut; default is an error.")
    pooling: Pooling | None = Field(
        "none", description="One vector for each row, of its real tokens; none: for each token."
    )
    encoding: Literal["base64", "float", "prompt_embeds"] | None = Field(
        "base64", description="Encoding in JSON; prompt_embeds (vLLM) needs the output token_embeddings."
    )
    return_tokens: bool | None = Field(False, description="Whether the response contains the token ids of a text.")
    special_tokens: bool | None = Field(
        None,
        description="With text: whether the tokenizer adds its special tokens; default true, false in static models.",
    )
    special_tokens_in_text: SpecialTokensInText | None = "allow"


class OutputDescription(Documented):
    """One of several outputs."""

    use_as: str = Field(description="Use of the output, such as: input of block 0.")
    dtype: TensorDtype
    shape: list[int]
    data: str | list[Any]


class Answer(Documented):
    """The model of an answer, and the dtype of its values."""

    model: str
    version: int
    dtype: TensorDtype


class EmbedAnswer(Answer):
    """The vectors that enter block 0, or another output under its own name, or several in `outputs`."""

    encoding: Literal["base64", "float", "prompt_embeds"]
    use_as: str | None = Field(None, description="Use of the output, such as: input of block 0.")
    shape: list[int] | None = Field(
        None, description="[B, L, D] if all rows have one length, else [T, D]; [B, D] with pooling."
    )
    embeddings: Values = Field(None, description="Base64 of little-endian bytes, or nested lists.")
    token_embeddings: Values = Field(
        None, description="Vectors of the token lookup, like embeddings; with prompt_embeds one base64 file per row."
    )
    outputs: dict[str, OutputDescription] | None = Field(None, description="Several requested outputs, by name.")
    next_offset: list[int] = Field(description="Offset of the next token, for each row.")
    next_context: list[list[int]] | None = Field(
        None, description="The ids before the next token of each row, with ngram_embeddings."
    )
    position_delta: list[int] | None = Field(
        None, description="Next position - next_offset of each row, for positions of three axes."
    )
    lengths: list[int] | None = Field(None, description="Tokens of each row, if they differ.")
    truncated: list[int] | None = Field(None, description="Tokens cut from each row, with truncate.")
    input_ids: list[list[int]] | None = Field(None, description="With return_tokens: the tokens of each text.")
    spans: list[list[tuple[int, int]]] | None = Field(
        None, description="Span of each token in the text: first character, and one past the last."
    )


class BiasRequest(RequestBody):
    """The lengths of a bias for the distance between a query and a key, or of sinusoids of distances."""

    query_length: int = Field(ge=1, description="Number of queries.")
    key_length: int = Field(ge=1, description="Number of keys.")
    query_offset: Natural | None = Field(0, description="Keys that were fed before the first query.")
    dtype: Dtype | None = "float32"
    encoding: Encoding | None = Field("base64", description="How JSON holds the values.")


class BiasAnswer(Answer):
    """The addend of attention for each head, query and key; or the sinusoid of each distance."""

    encoding: Encoding
    use_as: str = Field(description="Use of the output.")
    shape: list[int] = Field(description="[1, H, Q, K]; of a sinusoid [rows, D].")
    bias: Values = Field(None, description="Base64 of little-endian bytes, or nested lists.")
    relative_positions: Values = Field(None, description="Sinusoids of relative positions, like bias.")


class Problem(ListError):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    got: str | None = None
    expected: str | None = None
    request_id: str | None = Field(None, description="The X-Request-Id; none in a stream.")


class ProviderDescription(BaseModel):
    """The onnxruntime provider of the models, and the reason."""

    requested: str = Field(description="Provider in the settings: auto, cpu or cuda.")
    active: str = Field(description="The active onnxruntime provider.")
    probed: str | None = Field(description="Provider of the session opened to try CUDA; null without a trial.")
    reason: str | None = Field(description="Why CUDA is not used after a trial.")


class HealthPaths(Documented):
    """Paths for an orchestrator."""

    live: str = "/livez"
    ready: str = "/readyz"


class ProtocolPaths(Documented):
    """Where each protocol is served."""

    native: str = "/models/{name}/embed"
    decode: str = "/models/{name}/decode"
    openai: str = "/v1"
    open_inference: str = "/v2"
    grpc_port: int | None = Field(
        None, description="Port of the Open Inference Protocol over gRPC; null without a port."
    )


class ServiceIndex(Documented):
    """The addresses of the service, and the machine behind them."""

    name: str = "preblock"
    version: str
    workers: int = Field(description="Number of serving processes.")
    machine: str = Field(description="Processor, number of usable cores, and operating system.")
    docs: str = "/docs"
    inspector: str | None = Field(description="Page that shows the models; null if off.")
    openapi: str = "/openapi.json"
    models: str = "/models"
    protocols: ProtocolPaths
    health: HealthPaths
    metrics: str = "/metrics"


class Readiness(BaseModel):
    """Readiness, and the load of the process that answers."""

    ready: Literal[True] = True
    requests_running: int = Field(description="Requests and steps of streams that are not yet answered.")
    queue_depth: int = Field(description="Work items waiting for a thread.")


class ModelSummary(BaseModel):
    """A model in the list: its highest served version, or without one its highest version."""

    name: str
    version: int
    ready: bool = Field(description="Whether it is served.")
    family: str | None = Field(None, description="Null if the model is not ready.")
    random_weights: bool | None = Field(
        None, description="Whether the model is a preset, with weights from a seed; null if the model is not ready."
    )
    max_len: int | None = Field(None, description="The largest legal offset + real tokens; null without a limit.")
    vocab_size: int | None = Field(None, description="Ids are 0 to vocab_size - 1; null without token ids.")
    max_tokens: int | None = Field(None, description="Most tokens of one request.")


class ModelOutput(BaseModel):
    """An output of a model."""

    width: int | None = Field(description="Width of a vector; null for an attention bias.")
    use_as: str = Field(description="Use of the output.")
    description: str


class ModelDescription(BaseModel):
    """A served model."""

    name: str
    version: int
    identity: str = Field(description="SHA-256 of the manifest with the hashes of all files.")
    versions: list[int]
    random_weights: bool = Field(description="Whether the model is a preset, with weights from a seed.")
    provider: str = Field(description="The active onnxruntime provider.")
    provider_choice: ProviderDescription
    max_len: int | None = Field(description="The largest legal offset + real tokens; null without a limit.")
    max_tokens: int = Field(description="Most tokens of one request.")
    first_row: int | None = Field(description="Row of position 0 in the position table; null for a stem.")
    outputs: dict[str, ModelOutput] = Field(description="The outputs by name.")
    references_checked: Literal["header", "content"] | None = Field(
        description="Check of tables outside the artifact: of the headers, or also of the content; null without any."
    )
    manifest: Manifest | StemManifest
    parity: ParityReport


PROBLEMS = describe_errors(Problem, MEDIA_TYPE, 400, 401, 403, 404, 406, 413, 415, 422, 429, 500, 503)
MODEL_ERRORS = describe_errors(Problem, MEDIA_TYPE, 401, 403, 404, 503)
UNAVAILABLE = describe_errors(Problem, MEDIA_TYPE, 401, 503)
NOT_READY = describe_errors(Problem, MEDIA_TYPE, 503)
ARRAYS = {BYTES: BINARY, NPY: BINARY, SAFETENSORS: BINARY}
QUERY_FIELDS = ("offset", "context", "text", "truncate", "pooling", "output", "dtype", "encoding")
ROW_HEADERS = {
    "Preblock-Output": "Name of the output in a binary body.",
    "Preblock-Use-As": "Use of the output, such as: input of block 0.",
    "Preblock-Shape": "Sizes of a binary body, separated by commas.",
    "Preblock-Dtype": "Type of the values in a binary body.",
    "Preblock-Model": "Name of the model, with a binary body.",
    "Preblock-Version": "Version of the model, with a binary body.",
    "Preblock-Next-Offset": "next_offset of each row, or one number for all, with a binary body of up to 512 rows.",
    "Preblock-Next-Context": "next_context, row after row, with a binary body of up to 512 such ids.",
    "Preblock-Position-Delta": "position_delta, like Preblock-Next-Offset; for positions of three axes.",
    "Preblock-Lengths": "lengths, like Preblock-Next-Offset; where rows differ in length.",
    "Preblock-Truncated": "truncated, like Preblock-Next-Offset; with truncate.",
}
EMBED = describe_operation(
    {**describe_body(EmbedRequest, example={"input_ids": [[1, 2, 3], [4]], "encoding": "float"}), **ARRAYS},
    {**describe_body(EmbedAnswer), **ARRAYS},
    PROBLEMS,
    [
        describe_parameter("shape", "query", "Sizes of a body of raw int64, such as 2,3; without it one row."),
        describe_parameter("lengths", "query", "Tokens of each row in a body of arrays, such as [3,1]."),
        *(describe_parameter(name, "query", f"The field {name} of a body of arrays.") for name in QUERY_FIELDS),
    ],
)
EMBED["responses"][200]["headers"] = {
    name: {"description": text, "schema": {"type": "string"}} for name, text in ROW_HEADERS.items()
}
BIAS = describe_operation(
    describe_body(BiasRequest, example={"query_length": 2, "key_length": 3, "encoding": "float"}),
    {**describe_body(BiasAnswer), **ARRAYS},
    PROBLEMS,
)


class DecodeRequest(TokenFields):
    """Known rows of ids or parts, answered as events. Lines hold messages of `docs/decode.md` instead."""

    input_ids: Rows | None = Field(None, description="Rows of token ids of any lengths; a flat list is one row.")
    parts: list[list[PartObject]] | list[PartObject] | None = Field(None, description="As in the body of embed.")
    placeholder: PlaceholderObject | None = Field(None, description="With parts: a token that stands for vectors.")
    position_ids: Rows | None = Field(None, description="Position index of each token.")
    position_rows: Rows | None = Field(None, description="As in the body of embed.")
    special_tokens_in_text: SpecialTokensInText | None = "allow"
    chunk: int | None = Field(1, ge=1, lt=2**31, description="Tokens of each row in one event.")
    rows: int | None = Field(None, ge=0, description="Number of rows; default those of the tokens.")
    encoding: Encoding | None = Field("base64", description="How JSON holds the vectors.")


TEXT: OpenAPI = {"schema": {"type": "string"}}
DECODE = describe_operation(
    {
        NDJSON: TEXT | {"example": '{"input_ids": [1, 2]}\n{"input_ids": [3]}\n'},
        **describe_body(DecodeRequest, example={"input_ids": [1, 2, 3], "chunk": 2}),
    },
    {NDJSON: TEXT, EVENTS: TEXT},
    PROBLEMS,
    required=False,
)
DECODE["response_class"] = Response


class PositionsAnswer(Answer):
    """The vectors that a model adds to its tokens, one for each position."""

    encoding: Encoding
    use_as: str = Field(description="Use of the rows.")
    shape: list[int] = Field(description="[count, width].")
    position_embeddings: Values = Field(description="Base64 of little-endian bytes, or nested lists.")


TOKEN = "Spelling in the vocabulary of the tokenizer; null without one."


class Neighbour(BaseModel):
    """A token with a vector similar to another token's."""

    id: int
    token: str | None = Field(description=TOKEN)
    cosine: float = Field(description="Cosine of the two rows of the token table; 0 for a row of zeros.")


class NeighboursAnswer(BaseModel):
    """The nearest tokens of a token, the nearest first, without itself."""

    model: str
    version: int
    id: int
    token: str | None = Field(description=TOKEN)
    neighbours: list[Neighbour]


def _describe_number(name: str, description: str, lowest: int, highest: int, example: int) -> OpenAPI:
    """Return the OpenAPI entry of a query parameter with a whole number."""
    schema = {"type": "integer", "minimum": lowest, "maximum": highest}
    return {"name": name, "in": "query", "description": description, "schema": schema, "example": example}


ENCODING: OpenAPI = {
    "name": "encoding",
    "in": "query",
    "description": "How JSON holds the values; default base64.",
    "schema": {"type": "string", "enum": ["base64", "float"]},
    "example": "float",
}
POSITIONS = describe_operation(
    {},
    {**describe_body(PositionsAnswer), **ARRAYS},
    PROBLEMS,
    [
        _describe_number("first", "First position; default 0.", 0, 2**63 - 1, 0),
        _describe_number("count", f"Number of rows; default {DEFAULT_POSITIONS}.", 1, MAX_POSITIONS, 4),
        ENCODING,
    ],
)
NEIGHBOURS = describe_operation(
    {},
    {},
    PROBLEMS,
    [
        _describe_number("id", "Id of the token.", 0, 2**63 - 1, 3) | {"required": True},
        _describe_number("count", f"Number of tokens; default {DEFAULT_NEIGHBOURS}.", 1, MAX_NEIGHBOURS, 5),
    ],
)
