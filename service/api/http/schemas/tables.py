"""Query parameters and response bodies of the routes for position vectors and nearest tokens."""

from pydantic import BaseModel, Field

from preblock.service.api.http.schemas.common import ANSWER, OpenAPI, describe_body
from preblock.service.api.http.schemas.native_api import ARRAYS, PROBLEMS, Answer, Encoding, Values
from preblock.service.engine.tables import DEFAULT_NEIGHBOURS, DEFAULT_POSITIONS, MAX_NEIGHBOURS, MAX_POSITIONS


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
POSITIONS: OpenAPI = {
    "responses": {200: {"description": ANSWER, "content": {**describe_body(PositionsAnswer), **ARRAYS}}, **PROBLEMS},
    "openapi_extra": {
        "parameters": [
            _describe_number("first", "First position; default 0.", 0, 2**63 - 1, 0),
            _describe_number("count", f"Number of rows; default {DEFAULT_POSITIONS}.", 1, MAX_POSITIONS, 4),
            ENCODING,
        ]
    },
}
NEIGHBOURS: OpenAPI = {
    "responses": PROBLEMS,
    "openapi_extra": {
        "parameters": [
            _describe_number("id", "Id of the token.", 0, 2**63 - 1, 3) | {"required": True},
            _describe_number("count", f"Number of tokens; default {DEFAULT_NEIGHBOURS}.", 1, MAX_NEIGHBOURS, 5),
        ]
    },
}
