"""Common parts of the descriptions of every protocol."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from preblock.service.api.http.negotiation import JSON

Row = Annotated[list[int], Field(min_length=1)]
Rows = Annotated[list[Row], Field(min_length=1)] | Row
Text = Annotated[str, Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1)]
Truncate = Literal["left", "right"]


class Documented(BaseModel):
    """A description for the document alone: built at the first request for it, since most servers get none."""

    model_config = ConfigDict(defer_build=True)


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
COMPONENTS = "#/components/schemas/"
ANSWER = "What was asked for."
BINARY = {"schema": {"type": "string", "format": "binary"}}


def errors(kind: type[BaseModel], media: str, *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of the errors with these statuses, in a protocol's form."""
    return {status: {"description": ERRORS[status], "content": described(kind, media)} for status in statuses}


def described(kind: type[BaseModel], media: str = JSON) -> dict[str, Any]:
    """Return OpenAPI's entry of a body, by the name of its description."""
    return {media: {"schema": {"$ref": f"{COMPONENTS}{kind.__name__}"}}}
