"""Checks of the fields of a request, the same for all protocols."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from preblock.service.core.errors import Invalid


def refuse_unknown(names: Iterable[str], known: Iterable[str], field: str = "field") -> None:
    """Raise Invalid for the first of `names` outside `known`."""
    for name in names:
        if name not in known:
            allowed = ", ".join(known)
            message = f"unknown field {name}; expected {allowed}" if field == "field" else None
            raise Invalid(field, name, allowed, message=message)


def read_flag(field: str, value: Any) -> bool:
    """Return a boolean; raise Invalid for any other value."""
    if not isinstance(value, bool):
        raise Invalid(field, value, "true or false")
    return value


def read_choice(field: str, value: Any, allowed: Iterable[str]) -> str:
    """Return a string out of `allowed`; raise Invalid for any other value."""
    if not isinstance(value, str) or value not in allowed:
        raise Invalid(field, value, ", ".join(allowed))
    return value


def drop_nulls(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without its null members, which count as absent."""
    return {name: value for name, value in document.items() if value is not None}


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dictionary; raise ValueError for a repeated name."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{name} twice")
    return dict(pairs)


def format_value(value: Any) -> Any:
    """Return a value for a message: a string in quotes, to tell "5" from 5, and any other value unchanged."""
    return repr(value) if isinstance(value, str) else value
