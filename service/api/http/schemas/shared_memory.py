"""The bodies of Triton's extensions of system and CUDA shared memory."""

from fastapi.responses import Response
from pydantic import BaseModel, Field

from preblock.service.api.http.schemas.common import OpenAPI, RequestBody, describe_body
from preblock.service.api.http.schemas.v2 import open_inference_errors


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
REGISTER: OpenAPI = {
    "response_class": Response,
    "responses": open_inference_errors(400, 401, 403, 413, 415, 500, 503),
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": describe_body(RegisterRequest, example={"key": "/vectors", "byte_size": 1048576}),
        }
    },
}
STATUS_CUDA: OpenAPI = STATUS | {"response_model": list[CudaMemoryRegion]}
REGISTER_CUDA: OpenAPI = REGISTER | {
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": describe_body(RegisterCudaRequest),
        }
    },
}
UNREGISTER: OpenAPI = {"response_class": Response, "responses": open_inference_errors(401, 403)}
