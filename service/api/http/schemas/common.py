"""Common parts of the OpenAPI descriptions of all protocols."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from preblock.service.api.http.negotiation import JSON

OpenAPI = dict[str, Any]

Natural = Annotated[int, Field(ge=0, lt=2**63)]
Row = Annotated[list[Natural], Field(min_length=1)]
Rows = Annotated[list[Row], Field(min_length=1)] | Row
MaskRow = Annotated[list[Literal[0, 1]], Field(min_length=1)]
Masks = Annotated[list[MaskRow], Field(min_length=1)] | MaskRow
Text = Annotated[str, Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1)]
Truncate = Literal["left", "right"]
Pooling = Literal["none", "mean", "first", "last"]
SpecialTokensInText = Annotated[
    Literal["allow", "refuse", "plain"],
    Field(description="Whether a special token in a text becomes that token, is an error, or is ordinary text."),
]


Dtype = Literal["float32", "float16", "bfloat16"]
TableDtype = Literal["float32", "float16", "bfloat16", "stored"]
TensorDtype = Literal["float32", "float16", "bfloat16", "stored", "float8_e4m3fn", "int64"]


class Documented(BaseModel):
    """A description for the OpenAPI document alone, built at the first request for the document."""

    model_config = ConfigDict(defer_build=True)


class ListError(Documented):
    """The fields of an error about items of a list."""

    bad_indices: list[int] | None = Field(None, description="Indices of the first 100 bad items of a list.")
    bad_count: int | None = Field(None, description="Number of bad items.")


class RequestBody(Documented):
    """A body whose unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")


ERRORS = {
    400: "The body cannot be parsed.",
    401: "The API key is missing or unknown.",
    403: "The settings or the API key forbid the request.",
    404: "No such model or version.",
    406: "No acceptable response format.",
    409: "The sequence is at another offset.",
    413: "The request exceeds a size limit.",
    415: "Unsupported request format.",
    422: "A value is not allowed.",
    429: "The caller exceeds its request rate.",
    500: "An artifact is broken, or the service failed.",
    503: "The service is overloaded, or a file of the model has changed; retry later.",
}
COMPONENTS = "#/components/schemas/"
NAMED: dict[str, type[BaseModel]] = {}
"""Schemas that `refer_to` adds to the document. FastAPI does not know them, because routes read and write bytes."""
ANSWER = "The requested values."
BINARY = {"schema": {"type": "string", "format": "binary"}}


def describe_errors(kind: type[BaseModel], media: str, *statuses: int) -> dict[int | str, OpenAPI]:
    """Return OpenAPI entries of errors with these statuses, in the form of a protocol."""
    return {status: {"description": ERRORS[status], "content": describe_body(kind, media)} for status in statuses}


def refer_to(kind: type[BaseModel]) -> OpenAPI:
    """Return a reference to the schema of `kind`, which the document then has."""
    NAMED[kind.__name__] = kind
    return {"$ref": f"{COMPONENTS}{kind.__name__}"}


def describe_body(kind: type[BaseModel], media: str = JSON, example: Any = None) -> OpenAPI:
    """Return the OpenAPI entry of a body: a reference to its named schema, and an example."""
    return {media: {"schema": refer_to(kind)} | ({} if example is None else {"example": example})}


def describe_operation(
    request: OpenAPI,
    answer: OpenAPI,
    errors: Mapping[int | str, OpenAPI],
    parameters: Sequence[OpenAPI] = (),
    required: bool = True,
) -> OpenAPI:
    """Return arguments of a FastAPI route.

    Args:
        request: bodies by media type; empty for a request without a body.
        answer: bodies by media type; empty if FastAPI describes the response of the route.
        errors: entries by status.
        parameters: of the query and of headers.
        required: whether a request without a body is an error.

    """
    body = {"requestBody": {"required": required, "content": request}} if request else {}
    success = {200: {"description": ANSWER, "content": answer}} if answer else {}
    listed = {"parameters": list(parameters)} if parameters else {}
    return {"responses": {**success, **errors}, "openapi_extra": {**body, **listed}}


def describe_parameter(name: str, place: Literal["query", "header"], description: str) -> OpenAPI:
    """Return the OpenAPI entry of a parameter with a string as value."""
    return {"name": name, "in": place, "description": description, "schema": {"type": "string"}}
