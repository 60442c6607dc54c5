"""Steps as plain values, in the manifest of an artifact and in `frontend.toml`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

from preblock.models.steps import Segments, Step

KINDS: dict[str, type[Step]] = {step.kind: step for step in get_args(Step)}
TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("rows", "width", "first"), ("a whole number", (int,))),
    "zero_row": ("a whole number", (int, type(None))),
    "by": ("a number", (float, int)),
    **dict.fromkeys(("cast", "needed"), ("a bool", (bool,))),
}
"""The name and the types of the values of a field."""


def to_document(step: Step) -> dict[str, Any]:
    """Return a step as plain values, without the names of tensors in a checkpoint."""
    return {"kind": step.kind, **_without_names(asdict(step))}


def _without_names(values: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in values.items() if name not in ("weight", "columns") or value is None}
    if isinstance(plain.get("bias"), tuple):
        plain["bias"] = []
    if plain.get("grid"):
        plain["grid"] = list(plain["grid"])
    if "levels" in plain:
        plain["levels"] = [_without_names(level) for level in plain["levels"]]
    return plain


def from_document(document: Mapping[str, Any]) -> Step:
    """Return the step of a document written by `to_document`.

    Raises:
        ValueError: the kind or a field is not known.

    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, expected {', '.join(KINDS)}")
    for name, (expected, types) in TYPES.items():
        if name in values and type(values[name]) not in types:
            raise ValueError(f"{kind}.{name}: got {values[name]!r}, expected {expected}")
    try:
        if "levels" in values:
            values["levels"] = tuple(map(_level, values["levels"]))
        return KINDS[kind](**values)
    except TypeError as error:
        raise ValueError(f"{kind}: {error}") from error


def _level(document: Any) -> Segments:
    level = from_document({"kind": "segments", **document}) if isinstance(document, Mapping) else None
    if not isinstance(level, Segments):
        raise ValueError(f"levels: got {document!r}, expected tables with the fields of segments")
    return level
