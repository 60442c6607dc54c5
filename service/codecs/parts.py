"""Rows made of parts: the fields `parts` and `placeholder` of the native API."""

import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from preblock.service.codecs.fields import drop_nulls, format_value, read_one_text, refuse_unknown
from preblock.service.codecs.token_rows import read_integer, read_integer_list
from preblock.service.core.errors import Invalid, read_items
from preblock.service.core.types import RowPart, VectorPlaceholder

PART_FIELDS = ("input_ids", "text", "vectors", "soft_prompt")
FLOAT32 = np.dtype("<f4")


def read_parts(value: Any, empty: bool = False) -> tuple[tuple[RowPart, ...], ...]:
    """Read rows of parts; a flat list of parts is one row. With `empty` some rows may be empty.

    Raises:
        Invalid: a row or part is empty or has another type, or vectors are no base64 of finite float32 values. Or the
            value is None, beside a placeholder.

    """
    if value is None:
        message = "placeholder needs parts: its vectors stand for a token in the ids and texts of parts"
        raise Invalid("placeholder", "no parts beside it", "parts", message=message)
    if not isinstance(value, list) or not value:
        raise Invalid("parts", format_value(value), "a list of parts for each row")
    flat = isinstance(value[0], dict)

    def read_row(number: int, row: Any) -> tuple[RowPart, ...]:
        place = "parts" if flat else f"parts[{number}]"
        if not isinstance(row, list) or not (row or empty):
            raise Invalid(place, format_value(row), "a list of at least one part")
        return tuple(_read_part(f"{place}[{index}]", part) for index, part in enumerate(row))

    found = tuple(read_items([value] if flat else value, read_row))
    if not any(found):
        raise Invalid("parts", "only empty rows", "at least one part")
    return found


def _read_part(field: str, part: Any) -> RowPart:
    if not isinstance(part, dict):
        raise Invalid(field, format_value(part), f"an object with one of {', '.join(PART_FIELDS)}")
    given = drop_nulls(part)
    refuse_unknown(given, PART_FIELDS, field)
    if len(given) != 1:
        raise Invalid(field, " and ".join(given) or "nothing", f"one of {', '.join(PART_FIELDS)}")
    ((name, value),) = given.items()
    field = f"{field}.{name}"
    if name == "input_ids":
        return RowPart(field, ids=read_integer_list(field, value))
    if name == "text":
        return RowPart(field, text=read_one_text(field, value))
    if name == "soft_prompt":
        if not isinstance(value, str):
            raise Invalid(field, value, "the name of a soft prompt")
        return RowPart(field, prompt=value)
    return RowPart(field, vectors=_read_vectors(field, value))


def refuse_beside_parts(fields: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Raise Invalid for a field outside `allowed` in a request with parts."""
    for name, value in fields.items():
        if value is not None and name not in allowed:
            message = f"{name} cannot be used with parts; allowed are {', '.join(allowed)}"
            raise Invalid(name, "a value", "nothing beside parts", message=message)


def read_placeholder(value: Any) -> VectorPlaceholder:
    """Read the placeholder of given vectors.

    Raises:
        Invalid: a field is missing, unknown, or of the wrong type.

    """
    if not isinstance(value, dict):
        raise Invalid("placeholder", format_value(value), "an object with token_id and vectors")
    given = drop_nulls(value)
    refuse_unknown(given, ("token_id", "vectors"), "placeholder")
    token = read_integer("placeholder.token_id", given.get("token_id"))
    field = "placeholder.vectors"
    return VectorPlaceholder(token, RowPart(field, vectors=_read_vectors(field, given.get("vectors"), needed=False)))


def _read_vectors(field: str, value: Any, needed: bool = True) -> NDArray[np.float32]:
    """Return the values of base64 of little-endian float32; none only if they are not `needed`."""
    if not isinstance(value, str) or (needed and not value):
        raise Invalid(field, "nothing" if value is None else format_value(value), "base64 of float32 values")
    try:
        content = pybase64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Invalid(field, format_value(value), "base64 of float32 values") from error
    if len(content) % FLOAT32.itemsize:
        raise Invalid(field, f"{len(content)} bytes", "float32 values of 4 bytes each")
    values = np.frombuffer(content, FLOAT32)
    check_vectors(field, values)
    return values


def check_vectors(field: str, values: NDArray[np.float32]) -> None:
    """Raise Invalid for an infinite value or NaN."""
    finite = np.isfinite(values)
    if not finite.all():
        raise Invalid(field, float(values[~finite][0]), "finite values")
