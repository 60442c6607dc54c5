"""Chunks of large calls."""

import numpy as np
import pytest

from preblock.service.runtime.model import split_feeds


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 3), [(3, 3), (3, 3), (2, 3)]),
        ((7, 4), [(2, 4), (2, 4), (2, 4), (1, 4)]),
        ((2, 20), [(1, 10), (1, 10), (1, 10), (1, 10)]),
        ((2, 21), [(1, 11), (1, 10), (1, 11), (1, 10)]),
        ((25, 1), [(9, 1), (9, 1), (7, 1)]),
        ((1, 11), [(1, 11)]),
    ],
)
def test_feeds_are_split_into_few_and_equal_chunks(shape: tuple[int, int], expected: list[tuple[int, int]]) -> None:
    ids = np.arange(shape[0] * shape[1]).reshape(shape)
    found = list(split_feeds({"input_ids": ids, "offset": np.array([3])}, 11))
    assert [piece["input_ids"].shape for piece in found] == expected
    assert np.concatenate([piece["input_ids"].ravel() for piece in found]).tolist() == ids.ravel().tolist()
    begins = (piece["input_ids"][0, 0] % shape[1] if shape[1] > 11 else 0 for piece in found)
    assert [piece["offset"].tolist() for piece in found] == [[3 + begin] for begin in begins]
