"""Rows of integers from JSON and arrays. Oracle: numpy."""

from typing import Any

import numpy as np
import pytest

from preblock.service.codecs.token_rows import read_array_rows, read_floats, read_integers, read_json_rows
from preblock.service.core.errors import Invalid

BAD_JSON: list[tuple[Any, str, str]] = [
    (None, "x", "None"),
    ({"a": 1}, "x", "{'a': 1}"),
    ([[]], "x[0]", "[]"),
    ([[1], None], "x[1]", "None"),
    ([1, [2]], "x[1]", "[2]"),
    ([True], "x[0]", "True"),
    ([[1, 2], [3, None]], "x[1][1]", "None"),
    ([-(2**63) - 1], "x[0]", "-9223372036854775809"),
]
BAD_ARRAYS: list[tuple[Any, str, str]] = [
    (np.array(1), "x shape", "()"),
    (np.zeros((0, 3), np.int64), "x shape", "(0, 3)"),
    (np.broadcast_to(np.zeros((1, 0), np.int64), (2**40, 0)), "x shape", "(1099511627776, 0)"),
    (np.array([1], "m8[s]"), "x dtype", "timedelta64[s]"),
]


def test_invalid_rows_are_rejected_with_index() -> None:
    for read, cases in ((read_json_rows, BAD_JSON), (read_array_rows, BAD_ARRAYS)):
        for value, field, got in cases:
            with pytest.raises(Invalid) as refused:
                read("x", value)
            assert (refused.value.field, refused.value.got) == (field, got)
    for value in (float("nan"), float("-inf"), 1e39, "1", True, None):
        with pytest.raises(Invalid, match=r"^x\[1\]: got .*, expected a number that float32 holds$"):
            read_floats("x", [1.5, value, 2])
    with pytest.raises(Invalid, match=r"x\[1\]: got 1.0, expected a 64-bit integer"):
        read_integers("x", [1, 1.0])


def test_array_rows_support_any_integer_dtype_and_order() -> None:
    for dtype in ("i1", "u1", "<i2", ">i2", "<i4", "<u4", "<i8", ">i8", "<u8"):
        array = np.array([[1, 2, 3], [4, 5, 127]], dtype)
        for each in (array, np.asfortranarray(array)):
            rows = read_array_rows("x", each)
            assert rows.values.dtype == np.int64
            assert (rows.values.tolist(), rows.lengths.tolist()) == ([1, 2, 3, 4, 5, 127], [3, 3])
    array = np.arange(3)
    rows = read_array_rows("x", array)
    assert (rows.values.tolist(), rows.lengths.tolist(), rows.flat) == ([0, 1, 2], [3], True)
    assert np.shares_memory(rows.values, array)  # contiguous int64
