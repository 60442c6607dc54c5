"""Rows, requests and given vectors. Oracles: plain Python lists, and a search token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tests.support.profiles  # noqa: F401
from preblock.service.core.types import GivenVectors, TokenRows


def test_of_array_takes_rows_without_a_copy() -> None:
    array = np.arange(6).reshape(2, 3)
    rows = TokenRows.of_array(array)
    assert np.shares_memory(rows.values, array)
    assert (rows.values.tolist(), rows.lengths.tolist(), rows.length) == ([0, 1, 2, 3, 4, 5], [3, 3], 3)
    assert TokenRows(np.zeros(0, np.int64), np.zeros(0, np.int64)).length == 0


def test_place_names_row_and_column() -> None:
    places = [TokenRows(np.arange(6), np.array([3, 1, 2])).place(index) for index in range(6)]
    assert places == ["[0][0]", "[0][1]", "[0][2]", "[1][0]", "[2][0]", "[2][1]"]
    assert TokenRows(np.arange(3), np.array([3]), flat=True).place(2) == "[2]"


NUMBERS = st.sets(st.integers(0, 30), max_size=20).map(sorted)


@given(st.sets(st.integers(0, 30), min_size=1).map(sorted), NUMBERS)
def test_kept_vectors_are_numbered_by_their_tokens(tokens: list[int], kept: list[int]) -> None:
    values = np.array(tokens, np.float32)[:, None]
    found = GivenVectors(np.array(tokens), values).kept(np.array(kept, np.int64))
    expected = [(place, token) for place, token in enumerate(kept) if token in tokens]
    if found is None:
        assert not expected
    else:
        assert [*zip(found.tokens.tolist(), found.values[:, 0].tolist(), strict=True)] == expected
