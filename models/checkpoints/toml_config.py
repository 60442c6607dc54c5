"""A custom front-end, described in `frontend.toml` beside safetensors files, in the terms of the family table.

    max_len = 512                    # default: number of positions; unlimited without positions

    [[steps]]
    kind = "tokens"
    weight = "embed.weight"          # the name of the tensor

    [[steps]]
    kind = "scale"
    by = 22.627417

    [[steps]]
    kind = "positions"
    weight = "positions.weight"      # or table = "exact" with rows = 512, for sinusoids missing from the file

    [[rotary]]                       # cosines and sines for attention, as further outputs; default none
    dim = 64
    theta = 500000.0
    layout = "half"                  # or "interleaved"

`FrontEnd.save_frontend` writes such a folder.
`models/steps.py` has every kind and its fields; `FrontEndConfig` the fields beside the steps;
`models/modules/rotary_config.py` the fields of [[rotary]]: `RotaryConfig`, with `name` and `layout` of `RotaryOutput`.
"""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from preblock.models.checkpoints.reader import limit_of
from preblock.models.checkpoints.step_tensors import ByteCount, files_of_steps, read_tensors
from preblock.models.checkpoints.weight_files import DAMAGED, explain_errors, finite_float, read_bytes
from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import FrontEndData
from preblock.models.frontend_file import DESCRIPTION
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.models.serialization import check_names
from preblock.models.steps import Step, from_document

FURTHER = ("steps", "rotary", "no_rotary", "bias", "per_layer", "ngrams", "streams", "copies")
"""Fields of `FrontEndConfig` read apart from the plain values."""
BROKEN = (*DAMAGED, RecursionError)
"""Errors of the parser and of the fields for a file that is no description."""


def read_description(folder: Path, count_bytes: ByteCount = lambda *_: None, widen: bool = True) -> FrontEndData:
    """Build the front-end described by `frontend.toml` in `folder`, in float32; read no other tensor.

    `count_bytes` receives the bytes of each chunk converted to float32; `widen` as in `read_frontend`.

    Raises:
        CheckpointError: the file is damaged, or disagrees with the tensors.

    """
    file = folder / DESCRIPTION
    with explain_errors(file, BROKEN):
        steps, document = _read(file)
        rotary = _list("rotary", document.pop("rotary")) if "rotary" in document else []
        known = [field.name for field in fields(FrontEndConfig) if field.name not in FURTHER]
        check_names("", document, [*known, "steps", "rotary"])
        sized, tensors, _ = read_tensors(folder, steps, count_bytes=count_bytes, widen=widen)
        values = {"family": "custom", "max_len": limit_of(sized), **document}
        refused = values.get("refused_ids", [])
        if not isinstance(refused, list):
            raise ValueError(f"refused_ids: got {refused!r}, expected a list of token ids")
        values["refused_ids"] = tuple(refused)
        values["rotary"] = tuple(map(RotaryOutput.from_document, rotary))
        return FrontEndData(FrontEndConfig(steps=sized, **values), tensors).check()


def files_described(folder: Path) -> list[str]:
    """Return the names of the weight files to be opened by `read_description`; they need not exist yet.

    Raises:
        CheckpointError: the file is damaged.

    """
    with explain_errors(folder / DESCRIPTION, BROKEN):
        return files_of_steps(folder, _read(folder / DESCRIPTION)[0])


def _read(file: Path) -> tuple[list[Step], dict[str, Any]]:
    """Return the steps, and the other fields."""
    document = tomllib.loads(read_bytes(file).decode("utf-8-sig"), parse_float=finite_float)
    return [from_document(_with_keys(step)) for step in _list("steps", document.pop("steps", None))], document


def _list(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name}: expected a list of tables, [[{name}]]")
    return value


def _with_keys(step: dict[str, Any]) -> dict[str, Any]:
    """Return `step` with each tensor name as a list, and None for an optional one that it leaves out."""
    for name in ("weight", "columns", "bias"):
        value = step.get(name, "")
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(key, str) for key in value)):
            raise ValueError(f"{name}: got {value!r}, expected the name of a tensor")
    named = {
        name: [value] if name in ("weight", "columns", "bias") and isinstance(value, str) else value
        for name, value in step.items()
    }
    if step.get("kind") in ("norm", "project"):
        named.setdefault("bias", None)
    if step.get("kind") == "rms_norm":
        named.setdefault("weight", None)
    if isinstance(step.get("levels"), list):
        named["levels"] = [_with_keys(level) if isinstance(level, dict) else level for level in step["levels"]]
    return named
