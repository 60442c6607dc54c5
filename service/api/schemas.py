"""What OpenAPI tells of bodies that are read and written without pydantic, for speed."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from incipit.service.api.media import BYTES, EVENTS, JSON, NDJSON, NPY, SAFETENSORS
from incipit.service.api.problems import MEDIA_TYPE
from incipit.service.manifest import Manifest, ParityReport, StemManifest

Row = Annotated[list[int], Field(min_length=1)]
Rows = Annotated[list[Row], Field(min_length=1)] | Row
Text = Annotated[str, Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1)]
Truncate = Literal["left", "right"]


class Documented(BaseModel):
    """What the document alone says of a body: built when it is first asked for, since most servers never are."""

    model_config = ConfigDict(defer_build=True)


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


class Output(Documented):
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
    outputs: dict[str, Output] | None = Field(None, description="Where several were asked for: each by its name.")
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


class Provider(BaseModel):
    """Where models run, and why."""

    requested: str = Field(description="What the settings say: auto, cpu or cuda.")
    active: str = Field(description="The onnxruntime provider that really runs.")
    probed: str | None = Field(
        description="The one on which a session ran that was opened to try CUDA; null where none was."
    )
    reason: str | None = Field(description="Why CUDA is not used where it was tried.")


class Model(BaseModel):
    """A model as it is served."""

    name: str
    version: int
    identity: str = Field(description="SHA-256 of the manifest, which holds the hashes of the files.")
    versions: list[int]
    provider: str = Field(description="The onnxruntime provider that really runs.")
    provider_choice: Provider
    max_len: int | None = Field(description="The largest legal offset + real tokens; null where nothing limits it.")
    max_tokens: int = Field(description="Most tokens of one request.")
    manifest: Manifest | StemManifest
    parity: ParityReport


ERRORS = {
    400: "The body cannot be read.",
    401: "No key that is known, where one is needed.",
    403: "What the settings, or the key, do not allow.",
    404: "No such model or version.",
    406: "No such answer format.",
    409: "An offset that a sequence is not at.",
    413: "Over a limit of size.",
    415: "No such request format.",
    422: "A value is not allowed.",
    429: "More often than one caller may ask.",
    500: "An artifact is broken, or the service failed.",
    503: "Not ready, or too busy; try again later.",
}


def errors(kind: type[BaseModel], media: str, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI tells of the errors with these statuses, in the form that a door gives them."""
    return {status: {"description": ERRORS[status], "content": described(kind, media)} for status in statuses}


COMPONENTS = "#/components/schemas/"
ANSWER = "What was asked for."


def described(kind: type[BaseModel], media: str = JSON) -> dict[str, Any]:
    """Return what OpenAPI tells of a body, by the name of its description."""
    return {media: {"schema": {"$ref": f"{COMPONENTS}{kind.__name__}"}}}


PROBLEMS = errors(Problem, MEDIA_TYPE, 400, 401, 403, 404, 406, 413, 415, 422, 429, 500, 503)
NOT_FOUND = errors(Problem, MEDIA_TYPE, 401, 403, 404)
BINARY = {"schema": {"type": "string", "format": "binary"}}
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


class EmbeddingsRequest(Documented):
    """Inputs, as the API of OpenAI has them; `pooling` and `truncate` are additions to it."""

    model_config = ConfigDict(extra="forbid")

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
    object: Literal["model"]
    created: int = Field(description="When its artifact was written, in seconds since 1970.")
    owned_by: str


class OpenAIModels(BaseModel):
    """The models that are served."""

    object: Literal["list"]
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


EMBEDDINGS: dict[str, Any] = {
    "responses": {
        200: {"description": ANSWER, "content": described(EmbeddingsAnswer)},
        **errors(OpenAIError, JSON, 400, 401, 403, 404, 413, 415, 422, 429, 500, 503),
    },
    "openapi_extra": {"requestBody": {"required": True, "content": described(EmbeddingsRequest)}},
}


Parameters = dict[str, str | int | float | bool]


class Described(Documented):
    """A tensor of a model; sizes that are free are -1."""

    name: str
    datatype: str
    shape: list[int]


class InferInput(Documented):
    """A tensor of a request: its data here, or as bytes behind the JSON."""

    model_config = ConfigDict(extra="forbid")

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters = {}
    data: list[Any] = Field([], description="Flat or nested; absent beside the parameter binary_data_size.")


class InferWish(Documented):
    """An output that is asked for."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: Parameters = {}


class InferRequest(Documented):
    """Tensors by name, as the Open Inference Protocol has them."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(None, description="Comes back with the answer.")
    model_name: str | None = Field(None, description="Not used; the path names the model.")
    parameters: Parameters = {}
    inputs: list[InferInput]
    outputs: list[InferWish] | None = Field(None, description="Default is the first output.")


class InferOutput(Documented):
    """A tensor of an answer: its data here, or as bytes behind the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters | None = None
    data: list[float] | None = None


class InferAnswer(Documented):
    """The outputs that were asked for."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[InferOutput]


class ServerMetadata(BaseModel):
    """What the server is."""

    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    """Whether the process answers."""

    live: bool


class Ready(BaseModel):
    """Whether every model has run."""

    ready: bool


class ModelReady(BaseModel):
    """Whether a model is served."""

    name: str
    ready: bool


class ModelMetadata(BaseModel):
    """Inputs and outputs of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Described]
    outputs: list[Described]


class ModelState(BaseModel):
    """One version of a model in the repository."""

    name: str
    version: str
    state: str
    reason: str


class ModelStatistics(BaseModel):
    """What happened to one version of a model."""

    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since 1970; 0 for never.")
    inference_count: int = Field(description="Rows answered.")
    execution_count: int = Field(description="Requests that ran.")
    inference_stats: dict[str, dict[str, int]]
    response_stats: dict[str, Any]
    batch_stats: list[dict[str, Any]]
    memory_usage: list[dict[str, Any]]


class Statistics(BaseModel):
    """What happened to models."""

    model_stats: list[ModelStatistics]


class OpenInferenceError(Documented):
    """An error, as the Open Inference Protocol has it."""

    error: str


def open_inference_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI tells of errors of the Open Inference Protocol."""
    return errors(OpenInferenceError, JSON, *statuses)


OF_BODIES = (400, 401, 403, 413, 415, 422, 500, 503)
INFER: dict[str, Any] = {
    "responses": {
        200: {"description": ANSWER, "content": {**described(InferAnswer), BYTES: BINARY}},
        **open_inference_errors(404, 409, 429, *OF_BODIES),
    },
    "openapi_extra": {
        "parameters": [
            {
                "name": "Inference-Header-Content-Length",
                "in": "header",
                "description": "Bytes of the JSON, where the bytes of tensors follow it; 0 for nothing but bytes.",
                "schema": {"type": "string"},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {**described(InferRequest), BYTES: BINARY},
        },
    },
}
INDEX: dict[str, Any] = {
    "response_model": list[ModelState],
    "responses": open_inference_errors(*OF_BODIES),
    "openapi_extra": {
        "requestBody": {
            "content": {
                JSON: {
                    "schema": {
                        "type": "object",
                        "properties": {"ready": {"type": "boolean"}},
                        "additionalProperties": False,
                    }
                }
            }
        }
    },
}
CHANGE: dict[str, Any] = {
    "response_class": Response,
    "responses": open_inference_errors(404, *OF_BODIES),
    "openapi_extra": {
        "requestBody": {
            "content": {
                JSON: {
                    "schema": {
                        "type": "object",
                        "properties": {"parameters": {"type": "object"}},
                        "additionalProperties": False,
                    }
                }
            }
        }
    },
}


NAMED: dict[JsonSchemaMode, tuple[type[BaseModel], ...]] = {
    "validation": (EmbedRequest, BiasRequest, DecodeRequest, EmbeddingsRequest, InferRequest),
    "serialization": (EmbedAnswer, BiasAnswer, EmbeddingsAnswer, InferAnswer, Problem, OpenAIError, OpenInferenceError),
}
"""What the document holds by name, of requests and of answers."""


def document(build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the OpenAPI document that FastAPI builds once, with what is described by name alone, and without what no
    door answers.
    """
    whole = build()
    for mode, kinds in NAMED.items():
        _, found = models_json_schema([(kind, mode) for kind in kinds], ref_template=COMPONENTS + "{model}")
        whole["components"]["schemas"] |= found["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        whole["components"]["schemas"].pop(name, None)
    for operations in whole["paths"].values():
        for operation in operations.values():
            # FastAPI's own, wherever a path has parameters; here they are strings, and any is one.
            if operation["responses"].get("422", {}).get("description") == "Validation Error":
                del operation["responses"]["422"]
    return whole
