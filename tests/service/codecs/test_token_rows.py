"""Rows of integers from JSON and arrays. Oracle: numpy."""

from typing import Any

import numpy as np
import pytest

from preblock.service.codecs.token_rows import read_array_rows, read_floats, read_integers, read_json_rows, read_offset
from preblock.service.core.errors import Invalid


def test_json_rows_are_concatenated() -> None:
    cases: list[tuple[Any, list[int], list[int], bool]] = [
        ([1, 2, 3], [1, 2, 3], [3], True),
        ([[1, 2, 3]], [1, 2, 3], [3], False),
        ([[1], [2, 3], [4]], [1, 2, 3, 4], [1, 2, 1], False),
        ([2**63 - 1, -(2**63)], [2**63 - 1, -(2**63)], [2], True),
    ]
    for value, values, lengths, flat in cases:
        rows = read_json_rows("x", value)
        assert rows.values.dtype == rows.lengths.dtype == np.int64
        assert (rows.values.tolist(), rows.lengths.tolist(), rows.flat) == (values, lengths, flat)


BAD_JSON: list[tuple[Any, str, str]] = [
    (None, "x", "None"),
    (1, "x", "1"),
    ("12", "x", "'12'"),
    ({"a": 1}, "x", "{'a': 1}"),
    ([], "x", "[]"),
    ([[]], "x[0]", "[]"),
    ([[1], []], "x[1]", "[]"),
    ([[1], 2], "x[1]", "2"),
    ([[1], None], "x[1]", "None"),
    ([[1], "2"], "x[1]", "'2'"),
    ([1, [2]], "x[1]", "[2]"),
    ([1, 2.0], "x[1]", "2.0"),
    ([True], "x[0]", "True"),
    ([1, "2"], "x[1]", "'2'"),
    ([[1, 2], [3, None]], "x[1][1]", "None"),
    ([[1, 2], [3, True]], "x[1][1]", "True"),
    ([[2**63]], "x[0][0]", "9223372036854775808"),
    ([-(2**63) - 1], "x[0]", "-9223372036854775809"),
    ([[[1]]], "x[0][0]", "[1]"),
]
BAD_ARRAYS: list[tuple[Any, str, str]] = [
    (np.array(1), "x shape", "()"),
    (np.zeros((1, 1, 1), np.int64), "x shape", "(1, 1, 1)"),
    (np.zeros((0, 3), np.int64), "x shape", "(0, 3)"),
    (np.broadcast_to(np.zeros((1, 0), np.int64), (2**40, 0)), "x shape", "(1099511627776, 0)"),
    (np.array([1.0]), "x dtype", "float64"),
    (np.array([True]), "x dtype", "bool"),
    (np.array(["1"]), "x dtype", "<U1"),
    (np.array([1], "m8[s]"), "x dtype", "timedelta64[s]"),
    (np.array([2**63], np.uint64), "x", "9223372036854775808"),
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


def test_offset_is_one_integer_or_a_list() -> None:
    for value, expected in ((0, [0]), (-3, [-3]), ([1, 2], [1, 2])):
        offset = read_offset(value)
        assert (offset.dtype.name, offset.tolist()) == ("int64", expected)
    bad: list[Any] = [None, [], True, 1.0, "1", {}, [[1]], [True], [1, None], 2**63, [2**63]]
    for value in bad:
        with pytest.raises(Invalid, match=r"^offset"):
            read_offset(value)


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
