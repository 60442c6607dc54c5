"""Rows of integers for a decode stream: lists, arrays and tensors become int64, or an error if inexact."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from preblock.client.errors import invalid
from preblock.client.results import Int64


class TensorLike(Protocol):
    """The part of torch.Tensor used here; torch need not be installed."""

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        """Return the values as an array."""
        ...


Row = Sequence[int] | NDArray[np.integer[Any]] | TensorLike
Rows = Row | Sequence[Row]

ALLOWED = "64-bit integers: a row (L,), an array (R, L), or a list of rows"


def read_rows(field: str, rows: Rows) -> tuple[Int64, Int64]:
    """Return the integers of all rows one after another, int64 (T,), and the lengths of the rows, int64 (R,).

    Raises:
        RequestError: the values are not 64-bit integers, or not rows.

    """
    rows = from_torch(rows)
    if isinstance(rows, Sequence) and any(hasattr(row, "__len__") and not isinstance(row, str) for row in rows):
        parts = [read_integers(f"{field}[{index}]", row) for index, row in enumerate(rows)]
        return np.concatenate(parts), np.array([len(part) for part in parts])
    array = _integers(field, rows)
    if array.ndim not in (1, 2):
        raise invalid(field, f"{array.dtype} of shape {array.shape}", ALLOWED)
    array = np.atleast_2d(array)
    return array.ravel(), np.full(len(array), array.shape[1])


def list_rows(name: str, rows: Rows) -> list[list[int]]:
    """Return the rows of an argument as lists; raises as `read_rows`."""
    values, lengths = read_rows(name, rows)
    return [row.tolist() for row in np.split(values, np.cumsum(lengths)[:-1])]


def read_integers(field: str, values: int | Row) -> Int64:
    """Return an integer or a list of integers as int64 (N,).

    Raises:
        RequestError: the values are not 64-bit integers, or have several axes.

    """
    array = _integers(field, from_torch(values))
    if array.ndim > 1:
        raise invalid(field, f"{array.dtype} of shape {array.shape}", "64-bit integers of shape (length,)")
    return np.atleast_1d(array)


def from_torch(value: Any) -> Any:
    """Return a tensor as an array, and any other value unchanged."""
    return value.numpy(force=True) if hasattr(value, "detach") else value


def _integers(field: str, value: Any) -> Int64:
    try:
        array: NDArray[Any] = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise invalid(field, error, ALLOWED) from error
    exact = array.astype(np.int64) if array.dtype.kind in "iu" or not array.size else None
    if exact is None or (exact != array).any():
        raise invalid(field, f"{array.dtype} of shape {array.shape}", ALLOWED)
    return exact
