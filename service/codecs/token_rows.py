"""Read rows of integers from parsed JSON and from arrays, exactly."""

from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.codecs.fields import format_value
from preblock.service.core.errors import Invalid
from preblock.service.core.types import POSITION_ROWS, Int64, TokenRows

MAX_FLOAT32 = float(np.finfo(np.float32).max)
INTEGER = "a 64-bit integer"
INPUTS = ("input_ids", "position_ids", "attention_mask")
"""Inputs with an argument of their own in `TokenRequest`; the others are `indices`."""
POSITIONS, AXES = "position_ids", 3
"""The input with one position for each token, or with one on each axis: time, height and width."""
LISTS = "a list of integers, or a list of such rows"


@cache
def row_fields(indices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all inputs with a value for each token, for a model with the further inputs `indices`."""
    # Every model knows token_type_ids: validation rejects them with a message of its own.
    return tuple(dict.fromkeys((*INPUTS, POSITION_ROWS, "token_type_ids", *indices)))


def token_inputs(rows: dict[str, TokenRows]) -> dict[str, Any]:
    """Return inputs by name as arguments of `TokenRequest`; this takes the inputs out of `rows`."""
    return {name: rows.pop(name) for name in INPUTS if name in rows} | {"indices": rows}


def read_json_rows(field: str, value: Any, empty: bool = False) -> TokenRows:
    """Read a list of rows, or a flat list for one row.

    Raises:
        Invalid: another type, an empty batch, an empty row without `empty`, or a value outside the 64-bit integers
            (true and 1.0 are outside).

    """
    if not isinstance(value, list):
        raise Invalid(field, format_value(value), LISTS)
    if not value:
        raise Invalid(field, "[]", "at least one row of at least one integer")
    if not isinstance(value[0], list):
        return TokenRows(read_integers(field, value), np.array([len(value)]), flat=True)
    for index, row in enumerate(value):
        if not isinstance(row, list) or not (row or empty):
            bad = [number for number, other in enumerate(value) if not _is_row(other, empty)]
            raise Invalid(f"{field}[{index}]", format_value(row), "a row of at least one integer", items=bad)
    lengths = np.fromiter(map(len, value), np.int64, len(value))
    values = list(chain.from_iterable(value))
    return TokenRows(read_integers(field, values, lengths), lengths)


def _is_row(value: Any, empty: bool) -> bool:
    """Return whether a value of JSON is a row of 64-bit integers."""
    if not isinstance(value, list) or not value:
        return value == [] and empty
    return set(map(type, value)) <= {int} and _is_int64(min(value)) and _is_int64(max(value))


def read_rows(field: str, value: Any) -> TokenRows:
    """Read rows from JSON or from an array; raises as `read_json_rows` and `read_array_rows`."""
    return read_array_rows(field, value) if isinstance(value, np.ndarray) else read_json_rows(field, value)


def read_json_positions(value: Any, empty: bool = False) -> tuple[TokenRows, ...]:
    """Read `position_ids`: rows as in `read_json_rows`, or three lists of rows for time, height and width.

    Raises:
        Invalid: as `read_json_rows`, or another number of lists.

    """
    if not (isinstance(value, list) and value and isinstance(value[0], list) and isinstance([*value[0], 0][0], list)):
        return (read_json_rows(POSITIONS, value, empty),)
    if len(value) != AXES:
        raise Invalid(POSITIONS, f"{len(value)} lists of rows", f"{AXES}, for time, height and width")
    return tuple(read_json_rows(f"{POSITIONS}[{axis}]", rows, empty) for axis, rows in enumerate(value))


def read_array_positions(array: NDArray[Any], lengths: Int64 | None) -> tuple[TokenRows, ...]:
    """Read `position_ids`: an array as in `read_array_rows`, or one more dimension of 3 for time, height and width.

    Raises:
        Invalid: as `read_array_rows`.

    """
    if array.ndim != (3 if lengths is None else 2) or len(array) != AXES:
        return (read_array_rows(POSITIONS, array, lengths),)
    return tuple(read_array_rows(f"{POSITIONS}[{axis}]", part, lengths) for axis, part in enumerate(array))


def read_integers(field: str, values: list[Any], lengths: Int64 | None = None) -> Int64:
    """Return a list of Python integers as int64; with `lengths` the integers of rows, which errors then name."""
    if set(map(type, values)) <= {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            pass
    bad = np.array([index for index, value in enumerate(values) if not _is_int64(value)])
    rows = TokenRows(bad, np.array([len(values)]) if lengths is None else lengths, flat=lengths is None)
    place, got = rows.place(int(bad[0])), format_value(values[bad[0]])
    raise Invalid(field + place, got, INTEGER, items=rows.bad_items(bad))


def read_floats(field: str, values: list[Any]) -> NDArray[np.float32]:
    """Return a list of Python numbers as float32, rounded to nearest."""
    if set(map(type, values)) <= {int, float}:
        with np.errstate(over="ignore"):
            array = np.array(values, np.float64).astype(np.float32)
        if np.isfinite(array).all():
            return array
    bad = [index for index, value in enumerate(values) if not _is_float32(value)]
    got = format_value(values[bad[0]])
    raise Invalid(f"{field}[{bad[0]}]", got, "a number that float32 holds", items=bad)


def _is_float32(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_FLOAT32  # false for NaN


def read_offset(value: Any) -> Int64:
    """Read one offset, or a list or an array with an offset for each row: int64 (1,) or (B,)."""
    if isinstance(value, np.ndarray):
        return read_integer_list("offset", np.atleast_1d(value))
    if isinstance(value, list) and value:
        return read_integers("offset", value)
    if not _is_int64(value):
        raise Invalid("offset", format_value(value), f"{INTEGER}, or a list with one for each row")
    return np.array([value], np.int64)


def read_integer(field: str, value: Any) -> int:
    """Read one 64-bit integer."""
    if not _is_int64(value):
        raise Invalid(field, format_value(value), INTEGER)
    return int(value)


def read_array_rows(field: str, array: NDArray[Any], lengths: Int64 | None = None) -> TokenRows:
    """Read an integer array (B, L), or (L,) for one row; with `lengths`, (T,), all rows in order.

    Raises:
        Invalid: another rank or kind of dtype, values beyond int64, or lengths with another sum than T.

    """
    if array.ndim not in (1, 2):
        raise Invalid(f"{field} shape", str(array.shape), "(length,) or (batch, length)")
    exact = _read_integer_array(field, array)
    if lengths is None:
        return TokenRows.of_array(exact)
    if array.ndim != 1:
        raise Invalid(f"{field} shape", str(array.shape), "(tokens,) beside lengths")
    wrong = np.flatnonzero((lengths < 1) | (lengths > len(exact)))
    if len(wrong):
        allowed = f"1 to {len(exact)}, as many as {field} has"
        raise Invalid(f"lengths[{wrong[0]}]", int(lengths[wrong[0]]), allowed, items=wrong)
    if lengths.sum() != len(exact):
        raise Invalid("lengths", f"{lengths.sum()} tokens in all", f"{len(exact)}, as many as {field} has")
    return TokenRows(exact, lengths)


def read_integer_list(field: str, value: Any) -> Int64:
    """Read a list of integers, or an array of one dimension: int64 (N,)."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise Invalid(f"{field} shape", str(value.shape), "one dimension")
        return _read_integer_array(field, value)
    if not isinstance(value, list) or not value:
        raise Invalid(field, format_value(value), "a list of integers")
    return read_integers(field, value)


def _read_integer_array(field: str, array: NDArray[Any]) -> Int64:
    """Return an array with at least one value as int64, contiguous and aligned."""
    if array.dtype.kind not in "iu":
        raise Invalid(f"{field} dtype", str(array.dtype), "an integer type")
    if not array.size:  # a few bytes can declare any number of empty rows
        raise Invalid(f"{field} shape", str(array.shape), "at least one row of at least one integer")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and int(array.max()) >= 2**63:
        items = np.unique(np.argwhere(array >= 2**63)[:, 0])
        raise Invalid(field, int(array.max()), INTEGER, items=items)
    if array.dtype == np.int64 and array.flags.c_contiguous and array.flags.aligned:
        return array  # same result as `require`, but faster
    return np.require(array, np.int64, ("C", "A"))


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63
