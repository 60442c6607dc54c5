"""Messages of errors."""

from typing import Any

import pytest

from preblock.service.core.errors import Invalid, Malformed


def test_error_names_field_value_and_expected() -> None:
    error = Invalid("input_ids[3]", 11, "0 to 10")
    assert str(error) == "input_ids[3]: got 11, expected 0 to 10"
    assert (error.field, error.got, error.expected) == ("input_ids[3]", "11", "0 to 10")


def test_only_long_value_is_shortened() -> None:
    for got in ("x" * 81, "x" * 10**7, "é" * 81):
        assert Malformed("f", got, "a").got == got[:80] + "…"
    for value, got in (("x" * 80, "x" * 80), (None, "None"), (1.0, "1.0"), ([1, [2]], "[1, [2]]"), ("a\nb", "a\nb")):
        assert Invalid("f", value, "a").got == got


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [nested(5000), {"a": nested(5000)}, list(range(10**6)), {str(i): i for i in range(10**5)}]
)
def test_value_of_any_depth_and_length_is_shortened(value: Any) -> None:
    assert len(Invalid("f", value, "a").got) <= 81
