"""Configs as plain values: a document names one of several kinds, and holds its arguments; rules for their fields."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")
MAX_WHOLE = 2**62
"""Largest whole number of a config. The sum of two still fits into 64 bits."""
MAX_FLOAT32 = (2 - 2.0**-23) * 2.0**127
Keys = tuple[str, ...]
"""Possible names of one tensor in a checkpoint; the first one found counts."""


class Rule(NamedTuple):
    """A rule for the values of a field, in the annotation of its type, and the allowed values in words."""

    allows: Callable[[Any], bool]
    expected: str


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) <= MAX_FLOAT32


Whole = Annotated[int, Rule(_is_whole, "a whole number")]
Count = Annotated[int, Rule(lambda value: _is_whole(value) and value >= 1, "1 or more")]
Number = Annotated[float, Rule(_is_number, "a number")]
Finite = Annotated[float, Rule(_is_finite, "a finite number within float32")]
Positive = Annotated[float, Rule(lambda value: _is_finite(value) and value > 0, "a number above 0 within float32")]
Share = Annotated[float, Rule(lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1")]
Epsilon = Annotated[float, Rule(lambda value: _is_finite(value) and value >= 0, "a finite number from 0 on")]
"""Of a norm: the root of a negative sum would be NaN."""
Numbers = Annotated[
    tuple[float, ...], Rule(lambda value: isinstance(value, tuple) and all(map(_is_finite, value)), "numbers")
]
Flag = Annotated[bool, Rule(lambda value: type(value) is bool, "true or false")]
Text = Annotated[str, Rule(lambda value: type(value) is str, "a text")]


def config_of(document: Mapping[str, Any], kinds: Mapping[str, type[T]]) -> T:
    """Return the config of a document: one of `kinds`, with its arguments.

    Raises:
        ValueError: the kind, or a field or its value, is not known.

    """
    values = dict(document)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"kind: got {kind!r}, expected {', '.join(kinds)}")
    own: Any = kinds[kind]
    check_names(f"{kind}.", values, [field.name for field in fields(own)])
    for field in fields(own):
        if field.default is MISSING and field.name not in values:
            raise ValueError(f"{kind}.{field.name}: got none, expected a value")
    return kinds[kind](**values)


def check_names(prefix: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError for the first of the fields `given` that is not among the `known`."""
    for name in given:
        if name not in known:
            raise ValueError(f"{prefix}{name} is not known, expected are {', '.join(known)}")


def to_document(config: Any) -> dict[str, Any]:
    """Return a config as plain values: its kind, and its fields without the names of tensors in a checkpoint.

    A class may name fields in `absent`: they are left out at their defaults.
    """
    document = {"kind": config.kind} if hasattr(config, "kind") else {}
    for field in fields(config):
        value = getattr(config, field.name)
        named = field.name in ("weight", "weights", "columns") and value is not None
        if not named and (field.name not in getattr(config, "absent", ()) or value != field.default):
            document[field.name] = _plain(value)
    for level in document.get("levels", ()):
        del level["kind"]  # always segments
    return document


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return value.to_document() if hasattr(value, "to_document") else to_document(value)
    # Texts in a tuple are names of tensors.
    return [_plain(part) for part in value if not isinstance(part, str)] if isinstance(value, tuple) else value


def with_tuples(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a document, each list as a tuple."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}


def check_fields(config: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass by the rules in their annotations: a `Literal`, or an `Annotated` with a `Rule`.

    Numbers become those of Python, as libraries of tensors and documents expect: those of NumPy, and a whole number in
    a field of type float.

    Raises:
        ValueError: a value is not allowed; the message names the field, after `prefix`.

    """
    for name, (optional, rule, kind) in _rules_of(config.__class__).items():
        value = _without_numpy(getattr(config, name))
        if optional and value is None:
            continue
        if not rule.allows(value):
            raise ValueError(f"{prefix}{name}: got {value!r}, expected {rule.expected}")
        if _is_whole(value) and value > MAX_WHOLE:
            raise ValueError(f"{prefix}{name}: got {value}, expected at most {MAX_WHOLE}")
        object.__setattr__(config, name, float(value) if kind is float else value)


def _without_numpy(value: Any) -> Any:
    """Return a number of NumPy as one of Python, also in a tuple; other values as they are."""
    if isinstance(value, tuple):
        return tuple(map(_without_numpy, value))
    return value.item() if isinstance(value, np.generic) else value


@cache
def _rules_of(config: type) -> dict[str, tuple[bool, Rule, Any]]:
    """Return the rule of each field that has one, whether None is allowed beside it, and the type of the field."""
    rules: dict[str, tuple[bool, Rule, Any]] = {}
    for name, hint in get_type_hints(config, include_extras=True).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for part in parts:
            if get_origin(part) is Literal:
                allowed = get_args(part)
                rules[name] = NoneType in parts, Rule(allowed.__contains__, ", ".join(allowed)), str
            for rule in getattr(part, "__metadata__", ()):
                rules[name] = NoneType in parts, rule, part.__origin__
    return rules
