"""The OpenAPI document."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from pydantic.json_schema import models_json_schema

from preblock.service.api.http.dispatcher import is_public
from preblock.service.api.http.schemas.common import COMPONENTS, NAMED, OpenAPI

PATH_EXAMPLES = {
    "name": "gpt2-small",
    "model": "gpt2-small",
    "static_model": "potion",
    "version": "1",
    "region": "vectors",
}
"""Values of path parameters; `name` and `model` are one of `make serve`."""
BIAS_EXAMPLE = "t5-small"
"""A model with an attention bias."""
SCHEME = "key"
SUMMARY_END = re.compile(r"[.;](\s|$)|, or ")


def document(build: Callable[[], OpenAPI], needs_key: bool) -> OpenAPI:
    """Return the document built by FastAPI, with named schemas, security, summaries and examples.

    Args:
        build: builds the document of FastAPI.
        needs_key: whether callers need a key.

    """
    whole = build()
    schemas = whole["components"]["schemas"]
    template = COMPONENTS + "{model}"
    _, found = models_json_schema([(kind, "validation") for kind in NAMED.values()], ref_template=template)
    schemas |= found["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for schema in schemas.values():
        _describe_defaults(schema)
    description = "A key of the service. Services without keys ignore it."
    whole["components"]["securitySchemes"] = {SCHEME: {"type": "http", "scheme": "bearer", "description": description}}
    whole["security"] = [{SCHEME: []}] if needs_key else [{SCHEME: []}, {}]
    for path, operation in _operations(whole):
        # FastAPI adds this response to every path with parameters. Here any string is valid.
        if operation["responses"].get("422", {}).get("description") == "Validation Error":
            del operation["responses"]["422"]
        if is_public(path):
            operation["security"] = []
        summary = SUMMARY_END.split(operation["description"])[0]
        operation["summary"] = f"{summary}, by version" if "{version}" in path else summary
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path":
                named = path.endswith("/bias") and parameter["name"] == "name"
                parameter["example"] = BIAS_EXAMPLE if named else PATH_EXAMPLES[parameter["name"]]
    return whole


def _operations(whole: OpenAPI) -> Iterator[tuple[str, OpenAPI]]:
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            yield path, operation


def _describe_defaults(schema: dict[str, Any]) -> None:
    """Move defaults to the descriptions: openapi-typescript takes a property with a default for a required one."""
    for entry in schema.get("properties", {}).values():
        default = entry.pop("default", None)
        if default not in (None, {}, []):
            entry["description"] = f"{entry.get('description', '')} Default {json.dumps(default)}.".lstrip()
