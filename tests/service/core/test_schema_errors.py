"""Errors of pydantic in plain words."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from preblock.service.core.schema_errors import explain


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
    ({"count": [1]}, [1], "a whole number"),
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
