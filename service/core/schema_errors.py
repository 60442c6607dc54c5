"""Errors of pydantic in plain words: the value got and the value expected."""

from collections.abc import Mapping

from pydantic_core import ErrorDetails

EXPECTED: Mapping[str, str] = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "extra_forbidden": "no such field",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "missing": "a value",
    "model_type": "an object",
    "path_type": "a path",
    "string_pattern_mismatch": "a text like the regular expression {pattern}",
    "string_type": "a text",
    "tuple_type": "a list",
    "value_error": "{error}",
}
"""The expected value by the type of pydantic's error, with fields of its context."""


def explain(error: ErrorDetails) -> tuple[object, str]:
    """Return the value got and the value expected of an error listed by `ValidationError.errors()`."""
    got = "nothing" if error["type"] == "missing" else error["input"]
    template = EXPECTED.get(error["type"])
    # An error without a template starts "Input should be ", or is a sentence of its own.
    expected = error["msg"].removeprefix("Input should be ") if template is None else template.format(**_context(error))
    return got, expected


def _context(error: ErrorDetails) -> Mapping[str, object]:
    """Return the fields of the error's context, whole numbers without a decimal point."""
    context = error.get("ctx", {})
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in context.items()
    }
