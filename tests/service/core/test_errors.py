"""Messages of errors, and errors of pydantic in plain words."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from preblock.service.core.errors import Invalid, Malformed
from preblock.service.core.schema_errors import explain


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


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int = Field(ge=1, le=9)
    share: float = Field(0.5, gt=0, lt=1, allow_inf_nan=False)
    kind: Literal["a", "b", "c"] = "a"
    flag: bool = False
    name: str = Field("x", pattern="^x")
    items: list[int] = []
    fields: dict[str, int] = {}

    @field_validator("kind")
    @classmethod
    def _check(cls, value: str) -> str:
        if value == "c":
            raise ValueError("a or b today")
        return value


CASES: list[tuple[dict[str, Any], object, str]] = [
    ({}, "nothing", "a value"),
    ({"count": 1, "more": 2}, 2, "no such field"),
    ({"count": "x"}, "x", "a whole number"),
    ({"count": 1.5}, 1.5, "a whole number"),
    ({"count": 0}, 0, "at least 1"),
    ({"count": 10}, 10, "at most 9"),
    ({"count": 1, "share": 0}, 0, "more than 0"),
    ({"count": 1, "share": 1}, 1, "less than 1"),
    ({"count": 1, "share": "x"}, "x", "a number"),
    ({"count": 1, "share": float("inf")}, float("inf"), "a finite number"),
    ({"count": 1, "kind": "d"}, "d", "'a', 'b' or 'c'"),
    ({"count": 1, "kind": "c"}, "c", "a or b today"),
    ({"count": 1, "flag": "x"}, "x", "true or false"),
    ({"count": 1, "name": 1}, 1, "a text"),
    ({"count": 1, "name": "y"}, "y", "a text like the regular expression ^x"),
    ({"count": 1, "items": 1}, 1, "a list"),
    ({"count": 1, "fields": 1}, 1, "an object"),
]


def test_schema_error_is_explained_in_plain_words() -> None:
    for values, got, expected in CASES:
        with pytest.raises(ValidationError) as error:
            Record.model_validate(values)
        assert explain(error.value.errors()[0]) == (got, expected)
    with pytest.raises(ValidationError) as error:
        Record.model_validate_json("{")
    assert "Invalid JSON" in explain(error.value.errors()[0])[1]  # without a template
