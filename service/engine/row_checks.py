"""Checks of rows of integers. Each error is about the first bad value or row, and has the numbers of all bad items."""

import numpy as np

from preblock.service.core.errors import Invalid
from preblock.service.core.types import Bools, TokenRows


def check_range(field: str, rows: TokenRows, limit: int) -> None:
    """Raise Invalid if a value is outside 0 to `limit` - 1."""
    # As unsigned numbers, negative values are larger than any limit.
    refuse_values(field, rows, rows.values.view(np.uint64) >= limit, f"0 to {limit - 1}")


def refuse_values(field: str, rows: TokenRows, wrong: Bools, expected: str) -> None:
    """Raise Invalid for the first value with a true `wrong`, bool (T,), with all items that have such values."""
    if wrong.any():
        bad = np.flatnonzero(wrong)
        place, got = rows.place(int(bad[0])), int(rows.values[bad[0]])
        raise Invalid(field + place, got, expected, items=rows.bad_items(bad))


def check_same_lengths(field: str, rows: TokenRows, ids: TokenRows) -> None:
    """Raise Invalid if an input differs from the ids in the number of rows, or in the length of a row."""
    if len(rows.lengths) != len(ids.lengths):
        raise Invalid(field, f"{len(rows.lengths)} rows", f"{len(ids.lengths)} rows, as input_ids has")
    differs = rows.lengths != ids.lengths
    if differs.any():
        row = int(np.argmax(differs))
        got, number = int(rows.lengths[row]), ids.number(row)
        allowed = f"{int(ids.lengths[row])} values, as input_ids[{number}] has"
        raise Invalid(f"{field}[{number}]", f"{got} values", allowed, items=ids.bad_rows(differs))
