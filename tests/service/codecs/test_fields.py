"""Checks of the fields of a request."""

import pytest

from preblock.service.codecs.fields import refuse_unknown
from preblock.service.core.errors import Invalid


def test_first_unknown_field_name_is_rejected() -> None:
    refuse_unknown(["a", "b"], ("a", "b", "c"))
    with pytest.raises(Invalid, match="unknown field x; expected a, b"):
        refuse_unknown(["a", "x", "y"], ("a", "b"))
