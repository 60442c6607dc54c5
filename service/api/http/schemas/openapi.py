"""The OpenAPI document."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from preblock.service.api.http.schemas.common import COMPONENTS
from preblock.service.api.http.schemas.native import (
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
"""The named descriptions of requests and answers in the document."""


def document(build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the OpenAPI document that FastAPI builds once, with what is described by name alone, and without what no
    protocol answers.
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
