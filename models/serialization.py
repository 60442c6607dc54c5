"""Configs as plain values: a document names one of several kinds, and holds its arguments."""

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Keys = tuple[str, ...]
"""Possible names of one tensor in a checkpoint; the first one found counts."""


def config_of(document: Mapping[str, Any], kinds: Mapping[str, type[T]]) -> T:
    """Return the config of a document: one of `kinds`, with its arguments.

    Raises:
        ValueError: the kind, or a field or its value, is not known.

    """
    values = dict(document)
    kind = values.pop("kind", None)
    if kind not in kinds:
        raise ValueError(f"kind: got {kind!r}, expected {', '.join(kinds)}")
    try:
        return kinds[kind](**values)
    except TypeError as error:
        raise ValueError(f"{kind}: {error}") from error


def check_counts(**counts: int) -> None:
    """Raise ValueError unless every value is an int of 1 or more."""
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name}: got {count!r}, expected 1 or more")


def check_epsilon(name: str, value: Any) -> None:
    """Raise ValueError unless the epsilon of a norm is finite and not negative: a root of a negative sum is NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name}: got {value!r}, expected a finite number from 0 on")
