"""The bodies of the Open Inference Protocol, and of Triton's extensions of system and CUDA shared memory."""

from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from preblock.service.api.http.negotiation import BYTES, JSON
from preblock.service.api.http.schemas.common import (
    BINARY,
    Documented,
    ListError,
    OpenAPI,
    RequestBody,
    describe_body,
    describe_errors,
    describe_operation,
    describe_parameter,
)

Parameters = dict[str, str | int | float | bool | None]


class TensorDescription(Documented):
    """A tensor of a model; free sizes are -1."""

    name: str
    datatype: str
    shape: list[int]


class InferInput(TensorDescription):
    """A tensor of a request, with its data in JSON or in the bytes behind the JSON."""

    model_config = ConfigDict(extra="forbid")

    parameters: Parameters | None = None
    data: list[Any] | None = Field(None, description="Flat or nested; absent beside the parameter binary_data_size.")


class InferOutputRequest(RequestBody):
    """A requested output."""

    name: str
    parameters: Parameters | None = None


class InferRequest(RequestBody):
    """Tensors and parameters of a request."""

    id: str | None = Field(None, description="The answer repeats it.")
    model_name: str | None = Field(None, description="Not used; the path names the model.")
    parameters: Parameters | None = None
    inputs: list[InferInput]
    outputs: list[InferOutputRequest] | None = Field(None, description="Default is all outputs of tokens.")


class InferOutput(TensorDescription):
    """A tensor of an answer, with its data in JSON or in the bytes behind the JSON."""

    parameters: Parameters | None = None
    data: list[float] | None = None


class InferAnswer(Documented):
    """The requested outputs."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: Parameters | None = Field(None, description="`ignored_parameters` names the ignored parameters.")
    outputs: list[InferOutput]


class ServerMetadata(BaseModel):
    """Name, version and extensions of the server."""

    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    """Whether the process answers."""

    live: bool


class Ready(BaseModel):
    """Whether every model has run."""

    ready: bool


class ModelList(BaseModel):
    """Names of the served models."""

    models: list[str]


class ModelReady(BaseModel):
    """Whether a model is served."""

    name: str
    ready: bool


class ModelMetadata(BaseModel):
    """Inputs and outputs of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorDescription]
    outputs: list[TensorDescription]


class ModelState(BaseModel):
    """One version of a model in the repository."""

    name: str
    version: str
    state: str
    reason: str


class ModelStatisticsEntry(BaseModel):
    """Statistics of one version of a model."""

    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since 1970; 0 before the first inference.")
    inference_count: int = Field(description="Rows answered.")
    execution_count: int = Field(description="Executed requests.")
    inference_stats: dict[str, dict[str, int]]
    response_stats: dict[str, Any]
    batch_stats: list[dict[str, Any]]
    memory_usage: list[dict[str, Any]]


class ModelStatisticsList(BaseModel):
    """Statistics of models."""

    model_stats: list[ModelStatisticsEntry]


class OpenInferenceError(ListError):
    """An error of the Open Inference Protocol."""

    error: str


def open_inference_errors(*statuses: int) -> dict[int | str, OpenAPI]:
    """Return OpenAPI entries of errors of the Open Inference Protocol."""
    return describe_errors(OpenInferenceError, JSON, *statuses)


def _optional_body(**kinds: str) -> OpenAPI:
    """Return the OpenAPI entry of an optional body with fields of these types."""
    properties = {name: {"type": [kind, "null"]} for name, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"requestBody": {"content": {JSON: {"schema": schema, "example": {}}}}}


INFER_EXAMPLE = {
    "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [1, 2, 3]}],
    "outputs": [{"name": "embeddings"}],
}
BODY_ERRORS = (400, 401, 403, 413, 415, 500, 503)
INFER = describe_operation(
    {**describe_body(InferRequest, example=INFER_EXAMPLE), BYTES: BINARY},
    {**describe_body(InferAnswer), BYTES: BINARY},
    open_inference_errors(404, 409, 429, *BODY_ERRORS),
    [
        describe_parameter(
            "Inference-Header-Content-Length",
            "header",
            "Bytes of the JSON, where the bytes of tensors follow it; 0 for nothing but bytes.",
        )
    ],
)
INDEX: OpenAPI = {
    "response_model": list[ModelState],
    "responses": open_inference_errors(*BODY_ERRORS),
    "openapi_extra": _optional_body(ready="boolean"),
}
MODEL_CONTROL: OpenAPI = {
    "response_class": Response,
    "responses": open_inference_errors(404, *BODY_ERRORS),
    "openapi_extra": _optional_body(parameters="object"),
}


class SharedMemoryRegion(BaseModel):
    """A registered region of POSIX shared memory."""

    name: str
    key: str
    offset: int
    byte_size: int


class RegisterRequest(RequestBody):
    """The shared memory of a new region."""

    key: str = Field(description="Name of the POSIX shared memory.")
    offset: int | None = Field(0, description="First byte of the region.")
    byte_size: int


class CudaMemoryRegion(BaseModel):
    """A registered region in memory of a GPU."""

    name: str
    device_id: int
    byte_size: int


class CudaHandle(RequestBody):
    """A CUDA IPC handle."""

    b64: str = Field(description="The 64 bytes of the handle in base64.")


class RegisterCudaRequest(RequestBody):
    """The memory of a new region on a GPU."""

    raw_handle: CudaHandle
    device_id: int | None = Field(0, description="Number of the GPU.")
    byte_size: int


STATUS: OpenAPI = {
    "response_model": list[SharedMemoryRegion],
    "responses": open_inference_errors(401, 403, 404),
}
STATUS_CUDA: OpenAPI = STATUS | {"response_model": list[CudaMemoryRegion]}
REGISTER, REGISTER_CUDA = (
    describe_operation(body, {}, open_inference_errors(*BODY_ERRORS)) | {"response_class": Response}
    for body in (
        describe_body(RegisterRequest, example={"key": "/vectors", "byte_size": 1048576}),
        describe_body(RegisterCudaRequest),
    )
)
UNREGISTER: OpenAPI = {"response_class": Response, "responses": open_inference_errors(401, 403)}
