"""Checks of the fields of a request."""

from preblock.service.codecs.fields import rename_field
from preblock.service.core.errors import Invalid


def test_renamed_field_leaves_the_value_got() -> None:
    for error, renamed in (
        (Invalid("text", "'some text here'", "ids"), ("input", "input: got 'some text here', expected ids")),
        (Invalid("text", "'input_ids'", "as input_ids"), ("input", "input: got 'input_ids', expected as input")),
        (Invalid("input_ids[1]", 1, "0"), ("input[1]", "input[1]: got 1, expected 0")),
        (Invalid("offset", 1, "0"), ("offset", "offset: got 1, expected 0")),
        (Invalid("text", "", "ids", message="text: there is none"), ("input", "input: there is none")),
    ):
        assert rename_field(error, [(r"^(input_ids|text)\b", "input")], (r"\binput_ids\b", "input")) == renamed
