"""Rows of integers for a decode stream: lists, arrays and tensors become int64, or an error if inexact."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from preblock.client.errors import RequestError, bad_items, invalid
from preblock.client.results import Int64


class TensorLike(Protocol):
    """The part of torch.Tensor used here; torch need not be installed."""

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        """Return the values as an array."""
        ...


Row = Sequence[int] | NDArray[np.integer[Any]] | TensorLike
Rows = Row | Sequence[Row]

FIELDS = frozenset(
    (
        *("input_ids", "offset", "context", "position_ids", "position_rows", "attention_mask", "parts", "placeholder"),
        *("truncate", "pooling", "output", "dtype", "encoding", "step", "text", "return_tokens", "special_tokens"),
        "special_tokens_in_text",
    )
)
"""Fields of a request or of a step: no input of a model has their names."""
AXES = 3
"""Axes of positions in models of texts and images."""
ALLOWED = "64-bit integers: a row (L,), an array (R, L), or a list of rows"
ALLOWED_ROW = "64-bit integers: one, or a row (L,)"


def read_rows(field: str, rows: Rows) -> tuple[Int64, Int64]:
    """Return the integers of all rows one after another, int64 (T,), and the lengths of the rows, int64 (R,).

    Raises:
        RequestError: the values are not 64-bit integers, or not rows.

    """
    rows = to_plain(field, rows)
    if isinstance(rows, Sequence) and any(hasattr(row, "__len__") and not isinstance(row, str) for row in rows):
        parts = _read_each(field, rows)
        return np.concatenate(parts), np.array([len(part) for part in parts])
    array = _integers(field, rows, ALLOWED)
    if array.ndim not in (1, 2):
        raise invalid(field, f"{array.dtype} of shape {array.shape}", ALLOWED)
    array = np.atleast_2d(array)
    return array.ravel(), np.full(len(array), array.shape[1])


def read_positions(rows: Rows | Sequence[Rows]) -> tuple[Int64, Int64]:
    """Return `position_ids` of one axis as `read_rows` does; of three axes one after another, int64 (3 * T,).

    Raises:
        RequestError: as `read_rows`; or the axes are not three, or differ in their rows.

    """
    given: Any = to_plain("position_ids", rows)
    first = given[0] if isinstance(given, Sequence | np.ndarray) and len(given) else ()
    in_rows = (
        isinstance(first, Sequence) and not isinstance(first, str) and any(hasattr(row, "__len__") for row in first)
    )
    if not in_rows and getattr(first, "ndim", 0) != 2:
        return read_rows("position_ids", given)
    if len(given) != AXES:
        raise invalid("position_ids", f"{len(given)} axes", f"{AXES}, for time, height and width")
    axes = [read_rows(f"position_ids[{axis}]", part) for axis, part in enumerate(given)]
    for axis, (_, lengths) in enumerate(axes):
        if lengths.tolist() != axes[0][1].tolist():
            raise invalid(f"position_ids[{axis}]", f"rows of {lengths.tolist()}", f"rows of {axes[0][1].tolist()}")
    return np.concatenate([values for values, _ in axes]), axes[0][1]


def add_indices(inputs: Mapping[str, Any], indices: Mapping[str, Rows] | None) -> dict[str, Any]:
    """Return the inputs other than None, and the further ones in `indices`, by name.

    Raises:
        RequestError: `indices` is no mapping of names, or has the name of an argument.

    """
    if not isinstance(indices, Mapping | None):
        raise invalid("indices", f"a {type(indices).__name__}", "a mapping of names to rows")
    given = {name: rows for name, rows in inputs.items() if rows is not None}
    further: Mapping[Any, Any] = indices or {}
    for name, rows in further.items():
        if not isinstance(name, str) or rows is None:
            raise invalid("indices", f"{name!r}: {rows!r}", "names of inputs in Model.indices, each with rows")
        if name in FIELDS or name in given:
            raise invalid("indices", name, "names without an argument of their own")
    return given | dict(further)


def split_rows(values: Int64, lengths: Int64) -> Sequence[Any]:
    """Return the rows of `read_rows`, or of `read_positions`: of three axes the rows of each."""
    axes = np.split(values, AXES if len(values) > lengths.sum() else 1)
    rows = [np.split(axis, np.cumsum(lengths)[:-1]) for axis in axes]
    return rows if len(rows) > 1 else rows[0]


def list_rows(name: str, rows: Rows) -> list[list[int]]:
    """Return the rows of an argument as lists; raises as `read_rows`."""
    return [row.tolist() for row in split_rows(*read_rows(name, rows))]


def read_integers(field: str, values: int | Row) -> Int64:
    """Return an integer or a list of integers as int64 (N,).

    Raises:
        RequestError: the values are not 64-bit integers, or have several axes.

    """
    array = _integers(field, to_plain(field, values), ALLOWED_ROW)
    if array.ndim > 1:
        raise invalid(field, f"{array.dtype} of shape {array.shape}", ALLOWED_ROW)
    return np.atleast_1d(array)


def _read_each(field: str, rows: Sequence[Any]) -> list[Int64]:
    """Return each row as int64; the error of the first bad one has the indices of all."""
    found: list[Int64] = []
    errors: dict[int, RequestError] = {}
    for index, row in enumerate(rows):
        try:
            found.append(read_integers(f"{field}[{index}]", row))
        except RequestError as error:
            errors[index] = error
    if errors:
        first = next(iter(errors.values()))
        raise RequestError({**first.problem, **bad_items(list(errors))}) from first
    return found


def to_plain(field: str, value: Any) -> Any:
    """Return a tensor as an array, and any other value unchanged.

    Raises:
        RequestError: NumPy cannot hold the tensor, or an array of NumPy masks some of its values.

    """
    if np.ma.is_masked(value):  # a copy as a plain array would hold the masked values
        raise invalid(field, "a masked array", "an array without masked values")
    if not hasattr(value, "detach"):
        return value
    try:
        return value.numpy(force=True)
    except (TypeError, RuntimeError) as error:
        expected = "a dense tensor of a type of NumPy"
        raise invalid(field, f"a {value.layout} tensor of {value.dtype} ({error})", expected) from error


def to_json(fields: Mapping[str, Any]) -> str:
    """Return an object as JSON, with sequences, arrays, tensors and their scalars as lists and numbers.

    Raises:
        RequestError: a field has another value.

    """
    return "{" + ", ".join(f"{json.dumps(name)}: {_value(name, value)}" for name, value in fields.items()) + "}"


def _value(field: str, value: Any) -> str:
    allowed = "texts, numbers, and lists, arrays or tensors of them"

    def convert(part: Any) -> Any:
        if isinstance(part, bytes | bytearray | memoryview | type):
            raise invalid(field, f"a {type(part).__name__}", allowed)
        if hasattr(part, "tolist"):
            return part.tolist()
        if isinstance(part, Sequence):
            return list(part)
        raise invalid(field, f"a {type(part).__name__}", allowed)

    try:
        return json.dumps(value, default=convert)
    except (TypeError, ValueError, RecursionError) as error:  # such as a list that holds itself
        raise invalid(field, f"a {type(value).__name__} that JSON cannot hold", allowed) from error


def _integers(field: str, value: Any, allowed: str) -> Int64:
    try:
        array: NDArray[Any] = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise invalid(field, error, allowed) from error
    exact = array.astype(np.int64) if array.dtype.kind in "iu" or not array.size else None
    if exact is None or (exact != array).any():
        is_text = array.dtype.kind in "SU"
        raise invalid(field, reprlib.repr(value) if is_text else f"{array.dtype} of shape {array.shape}", allowed)
    return exact
