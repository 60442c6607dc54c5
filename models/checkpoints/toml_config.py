"""A front-end of one's own, described in `frontend.toml` beside safetensors files, in the terms of the family table.

    max_len = 512                    # default: what the positions allow; without positions, nothing limits it

    [[steps]]
    kind = "tokens"
    weight = "embed.weight"          # the name of the tensor

    [[steps]]
    kind = "scale"
    by = 22.627417

    [[steps]]
    kind = "positions"
    weight = "positions.weight"      # or table = "exact" with rows = 512, for sinusoids that are not in the file

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
from preblock.models.checkpoints.step_tensors import Told, files_of_steps, read_tensors
from preblock.models.checkpoints.weight_files import CheckpointError, one_line
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_file import DESCRIPTION
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.models.steps import Positions, Step, from_document

FURTHER = ("steps", "rotary", "no_rotary", "bias")
"""Fields of `FrontEndConfig` that are no plain values of the file."""


def read_description(folder: Path, told: Told = lambda *_: None, widen: bool = True) -> FrontEnd:
    """Build the front-end that `frontend.toml` in `folder` describes, with float32 tensors, reading no other tensor.

    `told` is told the bytes of each part that was converted to float32; `widen` is that of `read_frontend`.

    Raises:
        CheckpointError: the file is broken, or disagrees with the tensors.

    """
    file = folder / DESCRIPTION
    try:
        steps, document = _read(file)
        rotary = _list("rotary", document.pop("rotary")) if "rotary" in document else []
        known = [field.name for field in fields(FrontEndConfig) if field.name not in FURTHER]
        for name in document:
            if name not in known:
                raise ValueError(f"{name} is not known, allowed are {', '.join([*known, 'steps', 'rotary'])}")
        sized, tensors, _ = read_tensors(folder, steps, told=told, widen=widen)
        positions = next((step for step in sized if isinstance(step, Positions)), None)
        values = {"family": "custom", "max_len": limit_of(positions), **document}
        values["refused_ids"] = tuple(values.get("refused_ids", ()))
        values["rotary"] = tuple(map(RotaryOutput.from_document, rotary))
        return FrontEnd.from_tensors(FrontEndConfig(steps=sized, **values), tensors)
    except CheckpointError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from error


def files_described(folder: Path) -> list[str]:
    """Return the names of the weight files that `read_description` opens; they need not be there yet.

    Raises:
        CheckpointError: the file is broken.

    """
    try:
        return files_of_steps(folder, _read(folder / DESCRIPTION)[0])
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION}: {one_line(error)}") from error


def _read(file: Path) -> tuple[list[Step], dict[str, Any]]:
    """Return the steps, and what stands beside them."""
    document = tomllib.loads(file.read_text(encoding="utf-8"))
    return [from_document(_with_keys(step)) for step in _list("steps", document.pop("steps", None))], document


def _list(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name}: allowed is a list of tables, [[{name}]]")
    return value


def _with_keys(step: dict[str, Any]) -> dict[str, Any]:
    """Let the name of a tensor be a string, and a step that has a bias name it, or have none."""
    named = {
        name: [value] if name in ("weight", "columns", "bias") and isinstance(value, str) else value
        for name, value in step.items()
    }
    if step.get("kind") in ("norm", "project"):
        named.setdefault("bias", None)
    if isinstance(step.get("levels"), list):
        named["levels"] = [_with_keys(level) if isinstance(level, dict) else level for level in step["levels"]]
    return named
