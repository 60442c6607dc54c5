"""Given vectors. Oracle: a search token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tests.support.profiles  # noqa: F401
from preblock.service.core.types import GivenVectors

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
