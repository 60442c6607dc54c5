"""A front-end on disk: `frontend.toml` beside `model.safetensors`, a source for `preblock export FOLDER`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from preblock.models.serialization import to_document
from preblock.models.steps import Step, names_of, parameters

if TYPE_CHECKING:
    from preblock.models.config import FrontEndConfig
    from preblock.models.frontend_data import Array, FrontEndData

DESCRIPTION = "frontend.toml"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED_TYPES = ("float32", "float16", "bfloat16")
"""Allowed types of a checkpoint's tensors: float8 would need a scale, and float64 would be rounded."""


def write_frontend(folder: Path, data: "FrontEndData") -> None:
    """Write a front-end into `folder`, in place of an earlier one.

    Args:
        folder: created if missing.
        data: the front-end.

    Raises:
        ValueError: a tensor is of another type than `STORED_TYPES`, attention has a bias, or `folder` holds another
            checkpoint.
        OSError: a file cannot be written.

    """
    import numpy as np
    from safetensors.numpy import save_file

    config, tensors = data.config, data.tensors
    if config.per_layer is not None:
        raise ValueError(f"per_layer: got per-layer inputs, expected none: {DESCRIPTION} cannot describe them")
    if config.ngrams is not None:
        raise ValueError(f"ngrams: got n-gram embeddings, expected none: {DESCRIPTION} cannot describe them")
    if config.bias is not None:
        raise ValueError(f"bias: got {config.bias.kind!r}, expected none: {DESCRIPTION} cannot describe it")
    for name, tensor in tensors.items():
        if tensor.dtype.name not in STORED_TYPES:
            raise ValueError(f"{name}: got {tensor.dtype}, expected {', '.join(STORED_TYPES)}")
    if (folder / INDEX).exists():
        raise ValueError(f"{folder}: holds the {INDEX} of another checkpoint; choose another folder")
    if (folder / WEIGHTS).exists():
        _check_replaceable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # The tensors may be mapped from the old file: replace it only when the new one is complete.
    draft = folder / f".{WEIGHTS}.{token_hex(3)}"
    try:
        save_file({name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}, draft, {"format": "pt"})
        draft.replace(folder / WEIGHTS)
    finally:
        draft.unlink(missing_ok=True)
    (folder / DESCRIPTION).write_text("\n".join(_lines(config, tensors)) + "\n", encoding="utf-8")


def _check_replaceable(folder: Path) -> None:
    """Raise ValueError if the weights in `folder` hold a tensor that `frontend.toml` there does not name."""
    from safetensors import SafetensorError, safe_open

    file, description = folder / WEIGHTS, folder / DESCRIPTION
    described = description.read_text(encoding="utf-8") if description.exists() else ""
    try:
        with safe_open(file, framework="numpy") as weights:
            others = [key for key in weights.keys() if _value(key) not in described]  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file}: {error}; choose another folder") from error
    if others:
        raise ValueError(f"{file}: holds {others[0]}, which {DESCRIPTION} does not name; choose another folder")


def _lines(config: "FrontEndConfig", tensors: "Mapping[str, Array]") -> Iterator[str]:
    document = config.to_document()
    apart = ("steps", "rotary", "bias", "no_rotary", "per_layer", "ngrams")
    yield from _fields({name: value for name, value in document.items() if name not in apart})
    for name, step in zip(names_of(config.steps), config.steps, strict=True):
        yield from ("", "[[steps]]", *_fields(_with_keys(name, step, tensors)))
    for output in document["rotary"]:
        yield from ("", "[[rotary]]", *_fields(output))


def _with_keys(name: str, step: Step, tensors: "Mapping[str, Array]") -> dict[str, Any]:
    """Return the plain values of `step`, and the keys of its tensors: their names in `FrontEnd.state_dict()`."""
    values = to_document(step)
    for parameter in parameters(step):
        key = f"{name}.{parameter}"
        if key not in tensors:  # a derived table of positions
            continue
        part, _, field = parameter.rpartition(".")
        if part.isdigit():
            values["levels"][int(part)][field] = key
        else:
            values["columns" if part == "columns" else field] = key
    return values


def _fields(values: Mapping[str, Any]) -> Iterator[str]:
    # TOML has no null: omit the field, whose default is None.
    return (f"{name} = {_value(value)}" for name, value in values.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(_fields(value))} }}"
    return repr(value)
