"""Numbers of values, counted before parsing. Oracle: Python's `json`."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.support.profiles  # noqa: F401
from preblock.service.codecs.native_json import has_more_values, read_json
from preblock.service.core.errors import TooLarge

TEXTS = st.text('a,"\\', max_size=8)
VALUES = st.recursive(
    st.integers(0, 9) | TEXTS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
)


def separators(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return max(0, len(value) - 1) + sum(map(separators, items))


@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
@given(value=VALUES)
def test_separators_inside_strings_are_not_counted(chunk: int, value: Any) -> None:
    text, values = json.dumps(value).encode(), separators(value) + 1
    assert has_more_values(text, values - 1, chunk)
    assert not has_more_values(text, values, chunk)


def test_too_many_values_are_rejected_before_parsing() -> None:
    fits = b'{"text": "%b", "input_ids": [1,2,3]}' % (b"," * 100)
    assert read_json(fits, 4)["input_ids"] == [1, 2, 3]
    with pytest.raises(TooLarge, match=r"^body: got more than 3 JSON values, expected at most 3 JSON values$"):
        read_json(fits, 3)
    with pytest.raises(TooLarge):
        read_json(b"[1,2,3,4 and no JSON", 3)
