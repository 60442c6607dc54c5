"""The bodies of Triton's system shared memory extension."""

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
    offset: int = Field(0, description="First byte of the region.")
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
UNREGISTER: OpenAPI = {"response_class": Response, "responses": open_inference_errors(401, 403)}
