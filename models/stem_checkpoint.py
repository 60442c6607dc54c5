"""Reads the stem of a published checkpoint: `config.json` and safetensors files, by the rows of `STEMS`."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incipit.models.checkpoint import (
    CheckpointError,
    files_of_keys,
    get_tensor,
    one_line,
    open_weights,
    read_json,
    section_of,
)
from incipit.models.families import STEMS, Config, StemFamily
from incipit.models.stems import Stem, from_tensors, without_storage


def stem_name(config: Mapping[str, Any], side: str | None = None) -> str | None:
    """Return the name of the row of `STEMS` that `config` follows; None where that side of it is no stem."""
    name = f"{config.get('model_type')}/{side}" if side else str(config.get("model_type"))
    return name if name in STEMS else None


def read_stem(folder: Path, side: str | None = None) -> Stem:
    """Build the stem of the checkpoint in `folder`, with float32 tensors, reading no other tensor.

    Args:
        folder: holds `config.json` and safetensors files.
        side: "encoder" or "vision" of a model that has another side; None for one that has not.

    Raises:
        CheckpointError: a file is missing or broken, the family is not known, or its values are not understood.

    """
    values = read_json(folder / "config.json")
    name = stem_name(values, side)
    if name is None:
        got = f"{values.get('model_type')!r}, side {side!r}"
        raise CheckpointError(f"config.json: model_type is {got}, known are {', '.join(STEMS)}")
    family = STEMS[name]
    try:
        config = family.config(name, Config(section_of(values, family.sections)))
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error
    tensors = _read_tensors(folder, family, {key: t.shape for key, t in without_storage(config).state_dict().items()})
    try:
        return from_tensors(config, tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: tensors and config.json disagree: {one_line(error)}") from error


def _read_tensors(folder: Path, family: StemFamily, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the tensors of a row, under the names of the stem.

    A file may hold tables with an axis of the batch before them, of one element.
    """
    files = files_of_keys(folder)
    first = next(iter(family.keys.values()))
    prefix = next((prefix for prefix in ("", *family.prefixes) if prefix + first in files), None)
    if prefix is None:
        tried = " or ".join(prefix + first for prefix in ("", *family.prefixes))
        raise CheckpointError(f"{folder}: no tensor {tried}; do the files belong together?")
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, shape in shapes.items():
            key = prefix + family.keys[name]
            if key not in files:
                raise CheckpointError(f"{folder}: no tensor {key}")
            file = files[key]
            if file not in opened:
                opened[file] = stack.enter_context(open_weights(file))
            tensor = get_tensor(opened[file], key, file).to(torch.float32)
            while tensor.ndim > len(shape) and tensor.shape[0] == 1:
                tensor = tensor[0]
            tensors[name] = tensor
    return tensors
