"""Steps as plain values, in the manifest of an artifact and in `frontend.toml`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

from preblock.models.serialization import config_of
from preblock.models.steps import Segments, Step

KINDS: dict[str, type[Step]] = {step.kind: step for step in get_args(Step)}


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
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
    try:
        if "levels" in values:
            values["levels"] = tuple(map(_level, values["levels"]))
    except TypeError as error:
        raise ValueError(f"{values.get('kind')}: {error}") from error
    return config_of(values, KINDS)


def _level(document: Any) -> Segments:
    level = from_document({"kind": "segments", **document}) if isinstance(document, Mapping) else None
    if not isinstance(level, Segments):
        raise ValueError(f"levels: got {document!r}, expected tables with the fields of segments")
    return level
