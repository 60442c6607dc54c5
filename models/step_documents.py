"""Steps as plain values, in the manifest of an artifact and in `frontend.toml`."""

from collections.abc import Mapping
from typing import Any, get_args

from preblock.models.serialization import config_of, with_tuples
from preblock.models.steps import Segments, Step

KINDS: dict[str, type[Step]] = {step.kind: step for step in get_args(Step)}


def from_document(document: Mapping[str, Any]) -> Step:
    """Return the step of a document written by `to_document`.

    Raises:
        ValueError: the kind or a field is not known.

    """
    values = with_tuples(document)
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
