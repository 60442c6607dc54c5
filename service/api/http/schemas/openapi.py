"""The OpenAPI document."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from preblock.service.api.http.schemas.common import COMPONENTS
from preblock.service.api.http.schemas.native_api import (
    BiasAnswer,
    BiasRequest,
    DecodeRequest,
    EmbedAnswer,
    EmbedRequest,
    Problem,
)
from preblock.service.api.http.schemas.openai import EmbeddingsAnswer, EmbeddingsRequest, OpenAIError
from preblock.service.api.http.schemas.v2 import InferAnswer, InferRequest, OpenInferenceError

NAMED: dict[JsonSchemaMode, tuple[type[BaseModel], ...]] = {
    "validation": (EmbedRequest, BiasRequest, DecodeRequest, EmbeddingsRequest, InferRequest),
    "serialization": (EmbedAnswer, BiasAnswer, EmbeddingsAnswer, InferAnswer, Problem, OpenAIError, OpenInferenceError),
}
"""Named schemas of requests and answers, by the mode of pydantic."""


def document(build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the document built by FastAPI, with the named schemas, and without responses of no protocol."""
    whole = build()
    for mode, kinds in NAMED.items():
        _, found = models_json_schema([(kind, mode) for kind in kinds], ref_template=COMPONENTS + "{model}")
        whole["components"]["schemas"] |= found["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        whole["components"]["schemas"].pop(name, None)
    for operations in whole["paths"].values():
        for operation in operations.values():
            # FastAPI adds this response to every path with parameters. Here any string is valid.
            if operation["responses"].get("422", {}).get("description") == "Validation Error":
                del operation["responses"]["422"]
    return whole
