"""Queries of the native API for the tables of a model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from preblock.service.codecs.fields import refuse_unknown
from preblock.service.codecs.native_json import read_encoding
from preblock.service.codecs.token_rows import INTEGER, read_integer
from preblock.service.core.errors import Invalid


@dataclass(frozen=True)
class PositionQuery:
    """A request for rows of positions; without `count`, for `DEFAULT_POSITIONS` rows or the rest of the table."""

    first: int
    count: int | None
    encoding: str


@dataclass(frozen=True)
class NeighbourQuery:
    """A request for the nearest tokens of a token; without `count`, for `DEFAULT_NEIGHBOURS`."""

    id: int
    count: int | None


def read_position_query(query: Mapping[str, str]) -> PositionQuery:
    """Read the parameters `first` (default 0), `count` and `encoding`.

    Raises:
        Invalid: a parameter is unknown or of the wrong type.

    """
    refuse_unknown(query, ("first", "count", "encoding"))
    return PositionQuery(_read_number(query, "first") or 0, _read_number(query, "count"), read_encoding(query))


def read_neighbour_query(query: Mapping[str, str]) -> NeighbourQuery:
    """Read the parameters `id` (required) and `count`.

    Raises:
        Invalid: a parameter is missing, unknown or of the wrong type.

    """
    refuse_unknown(query, ("id", "count"))
    token = _read_number(query, "id")
    if token is None:
        raise Invalid("id", "nothing", "the id of a token")
    return NeighbourQuery(token, _read_number(query, "count"))


def _read_number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise Invalid(name, repr(text), INTEGER)
    return read_integer(name, int(text))
