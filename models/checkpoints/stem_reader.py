"""Reads the stem of a published checkpoint: `config.json` and safetensors files, by the rows of `STEMS`."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from preblock.models.checkpoints.divided_tensors import check_whole
from preblock.models.checkpoints.family_lookup import row_name, section_of
from preblock.models.checkpoints.other_names import describe_other_name
from preblock.models.checkpoints.step_tensors import TensorReader
from preblock.models.checkpoints.weight_files import (
    DISAGREE,
    CheckpointError,
    explain_errors,
    files_of_keys,
    is_sharded,
    read_config,
)
from preblock.models.families import STEMS
from preblock.models.families.family import StemFamily
from preblock.models.families.published_config import Config
from preblock.models.frontend_file import WEIGHTS
from preblock.models.modules.stems import Stem, StemConfig, from_tensors, without_storage
from preblock.models.torch_arrays import tensor_of


def read_stem(folder: Path, side: str | None = None) -> Stem:
    """Build the stem of the checkpoint in `folder`, with float32 tensors, reading no other tensor.

    Args:
        folder: holds `config.json` and safetensors files.
        side: "encoder" or "vision" of a model with two sides; None for a model with one.

    Raises:
        CheckpointError: a file is missing or damaged, or the family or one of its values is unknown.

    """
    family, config = _read_config(folder, side)
    tensors = _read_tensors(folder, family, _shapes_of(folder, config))
    with explain_errors(f"{folder}: {DISAGREE}", (RuntimeError,)):
        return from_tensors(config, tensors)


def stem_files_needed(folder: Path, side: str | None = None) -> list[str]:
    """Return the names of the weight files to be opened by `read_stem`; they need not exist yet.

    Raises:
        CheckpointError: as `read_stem`.

    """
    if not is_sharded(folder):
        return [WEIGHTS]
    family, config = _read_config(folder, side)
    files = files_of_keys(folder)
    prefix = _prefix(folder, family, files)
    keys = [prefix + family.keys[name] for name in _shapes_of(folder, config)]
    return sorted({files[key].name for key in keys if key in files})


def _read_config(folder: Path, side: str | None) -> tuple[StemFamily, StemConfig]:
    """Return the row of the family, and the stem's configuration in `config.json`."""
    values = read_config(folder)
    name = row_name(values, side)
    if name not in STEMS:
        got = f"{values.get('model_type')!r}, side {side!r}"
        raise CheckpointError(f"config.json: model_type is {got}, known are {', '.join(STEMS)}")
    with explain_errors("config.json", (ValueError,)):
        return STEMS[name], STEMS[name].config(name, Config(section_of(values, STEMS[name].sections)))


def _shapes_of(folder: Path, config: StemConfig) -> dict[str, torch.Size]:
    """Return the shapes of the tensors of a stem; raise CheckpointError if torch allows no tensor so large."""
    with explain_errors(f"{folder}: {DISAGREE}", (RuntimeError,)):
        return {name: tensor.shape for name, tensor in without_storage(config).state_dict().items()}


def _read_tensors(folder: Path, family: StemFamily, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the tensors of a row, under the names of the stem.

    A file may hold tables with an axis of the batch before them, of one element.
    """
    reader = TensorReader(folder, files_of_keys(folder))
    prefix = _prefix(folder, family, reader.files)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = reader.require((prefix + family.keys[name],))
        while tensor.ndim > len(shape) and tensor.shape[0] == 1:
            tensor = tensor[0]
        tensors[name] = tensor_of(tensor)
    return tensors


def _prefix(folder: Path, family: StemFamily, files: Mapping[str, Path]) -> str:
    """Return the prefix of the row's keys in the files."""
    first, prefixes = next(iter(family.keys.values())), ("", *family.prefixes)
    prefix = next((prefix for prefix in prefixes if prefix + first in files), None)
    if prefix is None:
        for start in prefixes:
            check_whole(folder, files, start + first)
        tried = " or ".join(prefix + first for prefix in prefixes)
        found = describe_other_name(files, [start + first for start in prefixes]) or "do the files belong together?"
        raise CheckpointError(f"{folder}: no tensor {tried}; {found}")
    return prefix
