"""Requests, embeddings and errors of `/embed` of text-embeddings-inference.

Source: its `docs/openapi.json`, version 1.8.
"""

from collections.abc import Mapping
from typing import Any

from preblock.service.artifacts.manifest import Manifest
from preblock.service.codecs.chunks import Part
from preblock.service.codecs.fields import (
    read_choice,
    read_flag,
    read_special_tokens_in_text,
    refuse_unknown,
    rename_field,
)
from preblock.service.codecs.native_json import read_text
from preblock.service.codecs.native_json_response import to_json_numbers, write_json_parts
from preblock.service.codecs.openai import INPUT_FORMS, lacks_sentences, read_dimensions
from preblock.service.codecs.token_rows import read_json_rows
from preblock.service.core.errors import (
    ClientFault,
    Invalid,
    Malformed,
    PreblockError,
    RateLimited,
    Unavailable,
)
from preblock.service.core.results import EmbedResult
from preblock.service.core.types import TextRequest, TokenRequest

FIELDS = ("inputs", "truncate", "truncation_direction", "normalize", "dimensions", "special_tokens_in_text")
DIRECTIONS = ("left", "right")
FIELD_NAMES = ((r"^(input_ids|text)\b", "inputs"), (r"^offset(\[\d+\]) \+ tokens$", r"inputs\1"))
"""Patterns of native field names, and their names here."""


def read_embed(document: Mapping[str, Any], model: str, manifest: Manifest) -> TextRequest | TokenRequest:
    """Read a request for sentence embeddings; a null field counts as missing.

    Raises:
        Invalid: a field is missing or unknown, its value is not allowed, or the model has no sentence embeddings.
        Malformed: there are no inputs.

    """
    if manifest.sentence is None:
        raise Invalid("model", model, "a static embedding model", message=lacks_sentences(model))
    refuse_unknown(document, FIELDS)
    direction = read_choice("truncation_direction", document.get("truncation_direction", "right"), DIRECTIONS)
    wanted: dict[str, Any] = {
        "pooling": "mean",
        "truncate": direction if read_flag("truncate", document.get("truncate", False)) else None,
        "normalize": read_flag("normalize", document.get("normalize", True)),
        "special_tokens_in_text": read_special_tokens_in_text(document),
        "dimensions": read_dimensions(document.get("dimensions"), "mean", manifest),
    }
    value = document.get("inputs")
    if value is None:
        raise Invalid("inputs", "nothing", INPUT_FORMS, message=f"inputs is required: {INPUT_FORMS}")
    if value in ("", []):
        raise Malformed("inputs", repr(value), "at least one text of at least one character")
    if isinstance(value, str) or (isinstance(value, list) and isinstance(value[0], str)):
        return TextRequest(text=read_text("inputs", value), **wanted)
    if not isinstance(value, list):
        raise Invalid("inputs", value, INPUT_FORMS)
    return TokenRequest(input_ids=read_json_rows("inputs", value), **wanted)


def write_embed(answer: EmbedResult) -> list[Part]:
    """Write a vector for each input, as a list of lists of numbers."""
    (tensor,) = answer.arrays.values()
    return write_json_parts(to_json_numbers(tensor))


def error_document(error: PreblockError) -> dict[str, Any]:
    """Return the message, with the field names of this API, and the kind of error."""
    _, message = rename_field(error, FIELD_NAMES, (r"\b(input_ids|text)\b(?=\[|:)", "inputs"))
    match error:
        case RateLimited():
            kind = "Overloaded"
        case Unavailable():
            kind = "Unhealthy"
        case Malformed(field="inputs"):
            kind = "Empty"
        case ClientFault():
            kind = "Validation"
        case _:
            kind = "Backend"
    return {"error": message, "error_type": kind, **error.item_fields}


def error_body(message: str, status: int) -> dict[str, str]:
    """Return a message as an error of this API."""
    return {"error": message, "error_type": "Validation" if status < 500 else "Backend"}
