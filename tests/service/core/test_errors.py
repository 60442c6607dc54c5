"""Messages of errors."""

from typing import Any

from preblock.service.core.errors import Invalid, Malformed


def test_only_long_value_is_shortened() -> None:
    for got in ("x" * 81, "x" * 10**7, "é" * 81):
        assert Malformed("f", got, "a").got == got[:80] + "…"
    for value, got in (("x" * 80, "x" * 80), (None, "None"), (1.0, "1.0"), ([1, [2]], "[1, [2]]"), ("a\nb", "a\nb")):
        assert Invalid("f", value, "a").got == got


def test_value_of_any_depth_and_length_is_shortened() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for value in (deep, {"a": deep}, list(range(10**6)), {str(i): i for i in range(10**5)}):
        assert len(Invalid("f", value, "a").got) <= 81
