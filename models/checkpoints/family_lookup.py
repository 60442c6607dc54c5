"""Finds the row of a published checkpoint in the family table or the stem table, from its `config.json` alone.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.families import FAMILIES, STEMS
from preblock.models.families.family import WHOLE, Family
from preblock.models.families.published_config import Config
from preblock.models.families.static import STATICS


def sides_of(model_type: str) -> list[str]:
    """Return the known sides of a model type, such as encoder and decoder; empty for a model with one side."""
    return [name.partition("/")[2] for name in (*STEMS, *FAMILIES) if name.startswith(f"{model_type}/")]


def known() -> list[str]:
    """Return all known model types."""
    return sorted({name.partition("/")[0] for name in (*FAMILIES, *STATICS, *STEMS)})


class _LibraryDefaults(Config):
    """A config without a key; 1 stands for values without a default."""

    def __call__(self, _: str, default: Any = None) -> Any:
        """Return `default`, or 1."""
        return 1 if default is None else default


def default_kinds(family: Family) -> list[str]:
    """Return the kinds of a family's steps with the library's default values."""
    return [step.kind for step in family.steps(_LibraryDefaults({}))]


def is_stem(config: Mapping[str, Any], side: str | None = None) -> bool:
    """Return whether `side` of the model with `config.json` is an encoder of images or spectrograms."""
    return "/" not in str(config.get("model_type")) and row_name(config, side) in STEMS


def row_name(config: Mapping[str, Any], side: str | None) -> str:
    """Return the name of the row for a config: `model_type`, or `model_type/side`."""
    return f"{config.get('model_type')}/{side}" if side else str(config.get("model_type"))


def family_of(config: Mapping[str, Any], side: str | None = None, segments: bool = False) -> tuple[str, Family]:
    """Return the name and the row of the family of `config`.

    Raises:
        CheckpointError: the family is unknown, has no such side or no `segments` to add, or a value is not supported.

    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        got = "is missing" if model_type is None else f"is {model_type!r}"
        raise CheckpointError(
            f"config.json: model_type {got}, expected a name such as 'bert'; `preblock families` lists the known ones"
        )
    sides = sides_of(model_type)
    name = f"{model_type}/{side}" if sides else model_type
    if not sides and (name not in FAMILIES or "/" in name):  # names with a slash are rows, not model types
        close = get_close_matches(model_type, known(), 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise CheckpointError(
            f"config.json: the model_type {model_type!r} is unknown; {hint}`preblock families` lists the known ones, "
            "and `pip install preblock[discover]` lets transformers describe others"
        )
    if sides and side not in sides:
        got = "is missing" if side is None else f"is {side!r}"
        raise CheckpointError(f"--side {got}, but a model of type {model_type!r} needs one of {', '.join(sides)}")
    if not sides and side is not None:
        raise CheckpointError(f"--side is only for models with two sides; {model_type!r} has one")
    family = FAMILIES[name]
    if segments and not family.segments:
        allowed = ", ".join(other for other, row in FAMILIES.items() if row.segments)
        raise CheckpointError(f"--segments is only for {allowed}, whose segments are token ids; the model is {name!r}")
    values = section_of(config, family.sections)
    for key, understood in family.only.items():
        value = _find(values, key)
        if value is not None and value not in understood:
            allowed = " or ".join(map(repr, understood))
            raise CheckpointError(f"config.json: {key} is {value!r}, understood is {allowed}")
    return name, family.parts.get(str(values.get("model_type")), family)


def _find(values: Mapping[str, Any], key: str) -> Any:
    name, _, rest = key.partition(".")
    value = values.get(name)
    if not rest or value is None:
        return value
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} is {value!r}, understood is an object")
    return _find(value, rest)


def section_of(document: Mapping[str, Any], sections: Sequence[str]) -> Mapping[str, Any]:
    """Return the first of `sections` found in `config.json`; all of the file without sections."""
    if not sections:
        return document
    key = next((key for key in sections if key == WHOLE or document.get(key) is not None), None)
    if key == WHOLE:
        return document
    if key is None or not isinstance(document[key], dict) or not document[key]:
        got = "is missing" if key is None else f"is {document[key]!r}"
        raise CheckpointError(f"config.json: {key or sections[-1]} {got}, expected an object with values")
    section: dict[str, Any] = document[key]
    return section
