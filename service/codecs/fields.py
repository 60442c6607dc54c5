"""Checks of the fields of a request, the same for all protocols."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from preblock.service.core.errors import Invalid, PreblockError, shorten
from preblock.service.core.types import SPECIAL_TOKENS_IN_TEXT

MAX_IGNORED, MAX_COMPARED_CHARS = 32, 64
"""Most ignored fields of a request, and the compared part of their names: a comparison holds the GIL."""
IN_TEXT = "special_tokens_in_text"
MISSPELT = 0.7
"""Likeness of a misspelt name by difflib's ratio: 0.78 for `truncation` and `truncate`."""


def refuse_unknown(names: Iterable[str], known: Iterable[str], field: str = "field") -> None:
    """Raise Invalid for the first of `names` outside `known`."""
    for name in names:
        if name not in known:
            allowed = ", ".join(known)
            message = f"unknown field {name}; expected {allowed}" if field == "field" else None
            raise Invalid(field, name, allowed, message=message)


def list_ignored(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return the `names` outside `known`, for an API whose servers ignore them.

    Raises:
        Invalid: there are too many to compare, or one is close to a known name, so it is probably misspelt.

    """
    ignored = [name for name in names if name not in known]
    if len(ignored) > MAX_IGNORED:
        raise Invalid("field", f"{len(ignored)} unknown fields", f"at most {MAX_IGNORED}")
    for name in ignored:
        if close := get_close_matches(name[:MAX_COMPARED_CHARS].lower(), known, 1, MISSPELT):
            message = f"unknown field {shorten(name)}; did you mean {close[0]}?"
            raise Invalid("field", name, close[0], message=message)
    return ignored


def read_flag(field: str, value: Any) -> bool:
    """Return a boolean; raise Invalid for any other value."""
    if not isinstance(value, bool):
        raise Invalid(field, value, "true or false")
    return value


def read_choice(field: str, value: Any, allowed: Iterable[str]) -> str:
    """Return a string out of `allowed`; raise Invalid for any other value."""
    if not isinstance(value, str) or value not in allowed:
        raise Invalid(field, value, ", ".join(allowed))
    return value


def read_special_tokens_in_text(fields: Mapping[str, Any]) -> str:
    """Return how texts with special tokens are read; default "allow", as the libraries of tokenizers do."""
    return read_choice(IN_TEXT, fields.get(IN_TEXT, "allow"), SPECIAL_TOKENS_IN_TEXT)


def refuse_special_tokens_in_text(value: Any, field: str = IN_TEXT) -> None:
    """Raise Invalid for this choice in a request of ids, unless it is None: nothing would be refused there."""
    if value is not None:
        raise Invalid(field, value, "nothing without text")


def refuse_beside_text(names: Iterable[str]) -> None:
    """Raise Invalid for the first of `names`, fields with a value for each token, in a request with text."""
    for name in names:
        message = f"{name} cannot be used with text, because the tokenizer makes the tokens of a text"
        raise Invalid(name, f"text and {name}", "one of them", message=message)


def read_one_text(field: str, value: Any) -> str:
    """Read a text; raise Invalid for another type, or an empty text."""
    if not isinstance(value, str) or not value:
        raise Invalid(field, format_value(value), "a text of at least one character")
    return value


def drop_nulls(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without its null members, which count as absent."""
    return {name: value for name, value in document.items() if value is not None}


def format_value(value: Any) -> Any:
    """Return a value for a message: a string in quotes, to tell "5" from 5, and any other value unchanged."""
    return repr(value) if isinstance(value, str) else value


def rename_field(error: PreblockError, names: Iterable[tuple[str, str]], mention: tuple[str, str]) -> tuple[str, str]:
    """Return the field of an error and its message with the names of another API. The value got stays as it is.

    Args:
        error: of the native API.
        names: patterns of native fields, and their names there.
        mention: pattern of a field in the rest of the message, and its name there.

    """
    field = error.field
    for pattern, name in names:
        field = re.sub(pattern, name, field)
    before, got, after = str(error).partition(f"got {error.got}")
    return field, got.join(re.sub(*mention, part) for part in (before.replace(error.field, field), after))
