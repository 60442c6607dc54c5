"""Requests, answers and errors of text-embeddings-inference.

Source: its `docs/openapi.json`, version 1.8.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from preblock.service.artifacts.manifest import Manifest
from preblock.service.codecs.chunks import MAX_JSON_VALUES, LazyText, Part
from preblock.service.codecs.fields import (
    list_ignored,
    read_choice,
    read_flag,
    rename_field,
)
from preblock.service.codecs.native_json import (
    check_finite,
    to_json_numbers,
    write_json_parts,
    write_numbers,
)
from preblock.service.codecs.openai import lacks_sentences, read_added_tokens, read_dimensions, read_inputs, write_list
from preblock.service.core.errors import (
    ClientFault,
    Invalid,
    Malformed,
    PreblockError,
    RateLimited,
    Unavailable,
)
from preblock.service.core.types import EmbedResult, TextRequest, TokenRequest

PROMPT = "prompt_name"
TOKEN_FIELDS = ("inputs", "truncate", "truncation_direction", "special_tokens_in_text", PROMPT)
SENTENCE_FIELDS = (*TOKEN_FIELDS, "normalize", "dimensions")
TOKENIZER_FIELDS = ("inputs", "add_special_tokens", "special_tokens_in_text", PROMPT)
DIRECTIONS = ("Left", "Right", "left", "right")
"""Its document has the first two, and its clients send the others."""
FIELD_NAMES = ((r"^(input_ids|text)\b", "inputs"), (r"^offset(\[\d+\]) \+ tokens$", r"inputs\1"))
"""Patterns of native field names, and their names here."""

Message = tuple[TextRequest | TokenRequest, list[str]]
"""A request, and the names of its ignored fields."""


def read_embed(document: Mapping[str, Any], model: str, manifest: Manifest) -> Message:
    """Read a request for sentence embeddings; a null field counts as missing.

    Raises:
        Invalid: a field is missing or misspelt, its value is not allowed, or the model has no sentence embeddings.
        Malformed: there are no inputs.

    """
    if manifest.sentence is None:
        raise Invalid("model", model, "a static embedding model", message=lacks_sentences(model))
    ignored = _list_ignored(document, SENTENCE_FIELDS)
    wanted: dict[str, Any] = {
        "pooling": "mean",
        "truncate": _read_truncation(document),
        "normalize": read_flag("normalize", document.get("normalize", True)),
        "dimensions": read_dimensions(document.get("dimensions"), "mean", manifest),
    }
    return _read_inputs(document, wanted), ignored


def read_embed_all(document: Mapping[str, Any], _model: str, _manifest: Manifest) -> Message:
    """Read a request for the vectors of all tokens; raise as `read_embed` does."""
    ignored = _list_ignored(document, TOKEN_FIELDS)
    return _read_inputs(document, {"truncate": _read_truncation(document)}), ignored


def read_tokenize(document: Mapping[str, Any], _model: str, _manifest: Manifest) -> Message:
    """Read a request for the tokens of texts; raise as `read_embed` does."""
    ignored = _list_ignored(document, TOKENIZER_FIELDS)
    # `truncate` lets the engine mark the special tokens; nothing is cut before a run.
    text = _read_inputs(document, {"truncate": "right"}, spans=True, special_tokens=read_added_tokens(document))
    if not isinstance(text, TextRequest):
        raise Invalid("inputs", document["inputs"], "a string or a list of strings")
    return text, ignored


def _list_ignored(document: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    if PROMPT in document:
        raise Invalid(PROMPT, document[PROMPT], "nothing, because models here have no prompts")
    return list_ignored(document, known)


def _read_truncation(document: Mapping[str, Any]) -> str | None:
    direction = read_choice("truncation_direction", document.get("truncation_direction", "right"), DIRECTIONS)
    return direction.lower() if read_flag("truncate", document.get("truncate", False)) else None


def _read_inputs(document: Mapping[str, Any], wanted: Mapping[str, Any], **of_text: Any) -> TextRequest | TokenRequest:
    if (value := document.get("inputs")) in ("", []):
        raise Malformed("inputs", repr(value), "at least one text of at least one character")
    return read_inputs(document, "inputs", wanted, **of_text)


def write_embed(answer: EmbedResult) -> list[Part]:
    """Write a vector for each input, as a list of lists of numbers."""
    (tensor,) = answer.arrays.values()
    return write_json_parts(to_json_numbers(tensor))


def write_embed_all(answer: EmbedResult) -> list[Part]:
    """Write a vector for each token of each input, as a list of lists of lists of numbers."""
    (tensor,) = answer.arrays.values()
    check_finite(tensor)
    rows = np.split(tensor.reshape(-1, tensor.shape[-1]), np.cumsum(answer.lengths)[:-1])
    written = map(write_numbers, rows)
    return [LazyText(write_list(written))] if tensor.size > MAX_JSON_VALUES else write_json_parts(list(written))


def write_tokens(text: Sequence[str], tokens: TokenRequest, spelled: Sequence[str | None]) -> list[Part]:
    """Write the tokens of each text, as a list of lists of objects; a special token has no place in its text.

    Args:
        text: the texts.
        tokens: of the texts, with spans and marks of special tokens.
        spelled: each token as the vocabulary spells it.

    """
    rows: list[list[dict[str, Any]]] = []
    assert tokens.spans is not None
    assert tokens.special is not None
    columns = zip(
        tokens.input_ids.values.tolist(), tokens.special.tolist(), tokens.spans.tolist(), spelled, strict=True
    )
    for source, length in zip(text, tokens.input_ids.lengths.tolist(), strict=True):
        row: list[dict[str, Any]] = []
        for _ in range(length):
            id_, special, (start, stop), spelling = next(columns)
            place = {"text": spelling} if special else {"text": source[start:stop], "start": start, "stop": stop}
            row.append({"id": id_, "special": special, "start": None, "stop": None} | place)
        rows.append(row)
    return [orjson.dumps(rows)]


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
