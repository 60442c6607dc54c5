"""Requests, embeddings and errors of the OpenAI API."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from preblock.service.codecs.chunks import Part
from preblock.service.codecs.fields import format_value, read_choice, refuse_unknown
from preblock.service.codecs.native_json import EmbedMessage, read_text
from preblock.service.codecs.native_json_response import (
    to_base64,
    to_finite_float32,
    to_floats,
    write_json_parts,
)
from preblock.service.codecs.token_rows import read_json_rows
from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.core.results import EmbedResult
from preblock.service.core.types import TextRequest, TokenRequest

FIELDS = ("model", "input", "encoding_format", "dimensions", "user", "pooling", "truncate")
ENCODINGS = ("float", "base64")
INPUT_FORMS = "a string, a list of strings, a list of token ids, or a list of such lists"
FIELD_NAMES = (
    (r"^(input_ids|text)\b", "input"),
    (r"^offset(\[\d+\]) \+ tokens$", r"input\1"),
    ("^encoding$", "encoding_format"),
)
"""Patterns of native field names, and their names in the OpenAI API."""
MAX_FLOATS = 2**18
"""Most values written as text at once, in a few milliseconds; more are written while they are sent."""


def read_model(document: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return name and version of the requested model, given as `name` or `name:version`.

    Raises:
        Invalid: an unknown field, or no model.

    """
    refuse_unknown(document, FIELDS)
    identifier = document.get("model")
    if not isinstance(identifier, str):
        raise Invalid("model", "nothing" if identifier is None else identifier, "the name of a model")
    return split_identifier(identifier)


def split_identifier(identifier: str) -> tuple[str, str | None]:
    """Return name and version of `name` or `name:version`."""
    name, colon, version = identifier.partition(":")
    return name, (version or identifier) if colon else None


def read_embeddings(document: Mapping[str, Any], width: int) -> EmbedMessage:
    """Read a request for vectors of `width`; a null field counts as missing.

    Raises:
        Invalid: a field is missing, or its value is not allowed.

    """
    given = {name: value for name, value in document.items() if value is not None}
    encoding = read_choice("encoding_format", given.get("encoding_format", "float"), ENCODINGS)
    dimensions, user = given.get("dimensions", width), given.get("user")
    if type(dimensions) is not int or dimensions != width:
        raise Invalid("dimensions", format_value(dimensions), f"{width}, the width of this model, or nothing")
    if not isinstance(user, str | None):
        raise Invalid("user", user, "a string")
    wanted: dict[str, Any] = {"pooling": given.get("pooling", "mean"), "truncate": given.get("truncate")}
    value = given.get("input")
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
        return EmbedMessage(TextRequest(text=read_text("input", value), **wanted), encoding)
    if not isinstance(value, list):
        raise Invalid("input", "nothing" if value is None else value, INPUT_FORMS)
    return EmbedMessage(TokenRequest(input_ids=read_json_rows("input", value), **wanted), encoding)


def write_embeddings(answer: EmbedResult, message: EmbedMessage) -> list[Part]:
    """Write a vector for each input; with the pooling "none" a vector for each token, and their shape."""
    (tensor,) = answer.arrays.values()
    if message.encoding == "float":
        tensor = to_finite_float32(tensor)
    whole = message.request.pooling == "none"
    parts = np.split(tensor.reshape(-1, tensor.shape[-1]), np.cumsum(answer.lengths)[:-1]) if whole else tensor
    write = to_base64 if message.encoding == "base64" else to_floats if tensor.size > MAX_FLOATS else np.asarray
    tokens = int(answer.lengths.sum())
    document: dict[str, Any] = {
        "object": "list",
        "model": answer.model,
        "version": answer.version,
        "data": [
            {"object": "embedding", "index": index, "embedding": write(part)} | ({"shape": part.shape} if whole else {})
            for index, part in enumerate(parts)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    if answer.truncated is not None:
        document["truncated"] = answer.truncated
    return write_json_parts(document)


def error_document(error: PreblockError, status: int) -> dict[str, Any]:
    """Return an error with the field name of the OpenAI API."""
    field = error.field
    for pattern, name in FIELD_NAMES:
        field = re.sub(pattern, name, field)
    return error_body(f"{field}: got {error.got}, expected {error.expected}", status, field, type(error).__name__)


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return a message as an error of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
