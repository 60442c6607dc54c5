"""Queries of the native API for the tables of a model."""

import re
from collections.abc import Mapping

from preblock.service.codecs.fields import refuse_unknown
from preblock.service.codecs.native_json import read_encoding
from preblock.service.codecs.token_rows import INTEGER, read_integer
from preblock.service.core.errors import Invalid


def read_position_query(query: Mapping[str, str]) -> tuple[int, int | None, str]:
    """Return the parameters `first` (default 0), `count` (None without one) and `encoding`.

    Raises:
        Invalid: a parameter is unknown or of the wrong type.

    """
    refuse_unknown(query, ("first", "count", "encoding"))
    return _read_number(query, "first") or 0, _read_number(query, "count"), read_encoding(query)


def read_neighbour_query(query: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the parameters `id` (required) and `count` (None without one).

    Raises:
        Invalid: a parameter is missing, unknown or of the wrong type.

    """
    refuse_unknown(query, ("id", "count"))
    token = _read_number(query, "id")
    if token is None:
        raise Invalid("id", "nothing", "the id of a token")
    return token, _read_number(query, "count")


def _read_number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise Invalid(name, repr(text), INTEGER)
    return read_integer(name, int(text))
