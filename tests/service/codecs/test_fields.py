"""Checks of the fields of a request."""

import pytest

from preblock.service.codecs.fields import refuse_unknown, rename_field
from preblock.service.core.errors import Invalid


def test_first_unknown_field_name_is_rejected() -> None:
    refuse_unknown(["a", "b"], ("a", "b", "c"))
    with pytest.raises(Invalid, match="unknown field x; expected a, b"):
        refuse_unknown(["a", "x", "y"], ("a", "b"))


@pytest.mark.parametrize(
    ("error", "field", "message"),
    [
        (Invalid("text", "'some text here'", "ids"), "input", "input: got 'some text here', expected ids"),
        (Invalid("text", "'input_ids'", "as input_ids"), "input", "input: got 'input_ids', expected as input"),
        (Invalid("input_ids[1]", 1, "0"), "input[1]", "input[1]: got 1, expected 0"),
        (Invalid("offset", 1, "0"), "offset", "offset: got 1, expected 0"),
        (Invalid("text", "", "ids", message="text: there is none"), "input", "input: there is none"),
    ],
)
def test_renamed_field_leaves_the_value_got(error: Invalid, field: str, message: str) -> None:
    assert rename_field(error, [(r"^(input_ids|text)\b", "input")], (r"\binput_ids\b", "input")) == (field, message)
