"""Reads the front-end of a published checkpoint: `config.json` and safetensors files, by the family table."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from incipit.models.families import FAMILIES, Family
from incipit.models.frontend import FrontEnd, FrontEndConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A folder that is not a checkpoint whose front-end is understood. The message says why."""


def read_frontend(folder: Path) -> FrontEnd:
    """Build the front-end of the checkpoint in `folder`, with float32 tensors, reading no other tensor.

    Raises:
        CheckpointError: a file is missing or broken, the family is not known, or its values are not understood.

    """
    config = _read_json(folder / "config.json")
    family = family_of(config)
    frontend_config = read_config(config, family)
    tensors = read_tensors(folder, family)
    try:
        return FrontEnd.from_tensors(frontend_config, tensors)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: tensors and config.json disagree: {_one_line(error)}") from error


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the row of the family table that `config` follows."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(f"config.json: model_type is {model_type!r}, known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def read_config(config: Mapping[str, Any], family: Family) -> FrontEndConfig:
    """Translate `config.json` by the family's row."""
    for key, value in family.required.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"config.json: {key} is {config[key]!r}, understood is {value!r}")
    values: dict[str, Any] = {}
    for name, (key, default) in family.fields.items():
        values[name] = config.get(key, default)
        if values[name] is ...:
            raise CheckpointError(f"config.json: {key} is missing; the family {family.model_type!r} needs it")
    for name, lowest in {"vocab_size": 1, "d_model": 1, "max_len": 1, "segments": 0}.items():
        value = values.get(name, lowest)
        if type(value) is not int or value < lowest:
            raise CheckpointError(f"config.json: {family.fields[name][0]} is {value!r}, allowed {lowest} or more")
    return FrontEndConfig(family=family.model_type, positions=family.positions, **values)


def read_tensors(folder: Path, family: Family) -> dict[str, Tensor]:
    """Read the family's tensors from `folder` as float32, under the names of `FrontEnd.state_dict()`."""
    files = _files_of_keys(folder)
    prefix = next((p for p in family.prefixes if _find(files, p, next(iter(family.tensors.values())))), None)
    if prefix is None:
        wanted = next(iter(family.tensors.values()))[0]
        tried = " or ".join(p + wanted for p in family.prefixes)
        raise CheckpointError(f"{folder}: no tensor {tried}; is this the checkpoint of a {family.model_type!r} model?")
    tensors = {}
    with ExitStack() as stack:
        opened = {}
        for name, keys in family.tensors.items():
            key = _find(files, prefix, keys)
            if key is None:
                raise CheckpointError(f"{folder}: no tensor {prefix}{keys[0]}")
            file = files[key]
            if file not in opened:
                opened[file] = stack.enter_context(_open(file))
            tensor = opened[file].get_tensor(key)
            if not tensor.is_floating_point():
                raise CheckpointError(f"{folder}: tensor {key} is {tensor.dtype}, allowed a floating-point type")
            tensors[name] = tensor.to(torch.float32)
    return tensors


def _find(files: Mapping[str, Path], prefix: str, keys: tuple[str, ...]) -> str | None:
    return next((prefix + key for key in keys if prefix + key in files), None)


def _files_of_keys(folder: Path) -> dict[str, Path]:
    """Return which file of `folder` holds which tensor; the index decides where there is one."""
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX}: no weight_map of tensors to files")
        for file in set(weight_map.values()):
            if Path(file).name != file:
                raise CheckpointError(f"{folder / INDEX}: {file!r} lies outside the folder")
        return {key: folder / file for key, file in weight_map.items()}
    if (folder / WEIGHTS).is_file():
        with _open(folder / WEIGHTS) as weights:
            return dict.fromkeys(weights.keys(), folder / WEIGHTS)
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: only pytorch_model.bin, a pickle, which can run any code when it is read; convert it to "
            "safetensors first: load it with transformers where you trust it, then save_pretrained()"
        )
    raise CheckpointError(f"{folder}: neither {WEIGHTS} nor {INDEX}")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {_one_line(error)}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent}: no {file.name}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: {_one_line(error)}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return document


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
