"""Query parameters."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from starlette.datastructures import QueryParams

from preblock.service.core.errors import Invalid


@lru_cache  # a client asks the same again and again
def single_values(query: bytes) -> Mapping[str, str]:
    """Return the parameters of a query string by name.

    Raises:
        Invalid: one is given more than once.

    """
    parameters = QueryParams(query)
    for name in parameters:
        if len(parameters.getlist(name)) > 1:
            raise Invalid(name, f"{len(parameters.getlist(name))} times in the query", "once; a list is written [1,2]")
    return MappingProxyType(dict(parameters))
