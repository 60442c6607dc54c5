"""Reads the front-end of a published checkpoint: `config.json` and safetensors files, by the family table."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from incipit.models.companions import LengthMissing, as_stored, find_rotary, read_rotary
from incipit.models.families import ALL, FAMILIES, SIZES, Config, Family, known, sides_of
from incipit.models.frontend import FrontEnd, FrontEndConfig, names_of
from incipit.models.sinusoids import POSITIONS
from incipit.models.steps import Norm, Positions, Project, Segments, Step, Tokens

PLAIN = (torch.float32, torch.float16, torch.bfloat16)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A folder that is not a checkpoint whose front-end is understood. The message says why."""


def read_frontend(
    folder: Path,
    side: str | None = None,
    arithmetic: Literal["float32", "source"] = "float32",
    rotary_length: int | None = None,
) -> FrontEnd:
    """Build the front-end of the checkpoint in `folder`, with float32 tensors, reading no other tensor.

    Args:
        folder: holds `config.json` and safetensors files.
        side: "encoder" or "decoder" of a model that has both; None for one that has not.
        arithmetic: "source" rounds after every step to the type of the token table in the file, as a library does that
            loads the model in that type; default float32, in which every type of file is exact.
        rotary_length: for a rotary model whose frequencies depend on it (rope types "dynamic" and "longrope"), tokens
            of the whole sequence; default None, which leaves the rotary outputs of such a model out.

    Raises:
        CheckpointError: a file is missing or broken, the family is not known, or its values are not understood.

    """
    values = _read_json(folder / "config.json")
    name, family = family_of(values, side)
    try:
        template = family.steps(Config(values))
    except TypeError as error:
        raise CheckpointError(f"config.json: a value that {name!r} needs is missing: {error}") from error
    steps, tensors, stored = read_tensors(folder, template, family.prefix)
    try:
        config = _configure(name, family, values, steps)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: tensors and config.json disagree: {one_line(error)}") from error
    config = _with_rotary(config, folder, family.prefix, values, rotary_length)
    try:
        return FrontEnd.from_tensors(
            replace(config, arithmetic=stored if arithmetic == "source" else "float32"), tensors
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: tensors and config.json disagree: {one_line(error)}") from error


def family_of(config: Mapping[str, Any], side: str | None = None) -> tuple[str, Family]:
    """Return the name and the row of the family table that `config` follows."""
    model_type = config.get("model_type")
    sides = sides_of(str(model_type))
    name = f"{model_type}/{side}" if sides else str(model_type)
    if not sides and name not in FAMILIES:
        raise CheckpointError(f"config.json: model_type is {model_type!r}, known are {', '.join(known())}")
    if sides and side not in sides:
        raise CheckpointError(f"--side: got {side!r}, allowed for {model_type!r}: {', '.join(sides)}")
    if not sides and side is not None:
        raise CheckpointError(f"--side: got {side!r}, allowed only for models that have sides; {model_type!r} has none")
    family = FAMILIES[name]
    for key, understood in family.only.items():
        if config.get(key) is not None and config[key] not in understood:
            allowed = " or ".join(map(repr, understood))
            raise CheckpointError(f"config.json: {key} is {config[key]!r}, understood is {allowed}")
    return name, family


def read_tensors(
    folder: Path, steps: Sequence[Step], prefix: str = ""
) -> tuple[tuple[Step, ...], dict[str, Tensor], Any]:
    """Return `steps` with their sizes, their tensors, and the type that the first of these has in the file.

    The tensors are float32, under the names of `FrontEnd.state_dict()`. Every name in the files may have `prefix`
    before it. A table of positions that is in the file wins over the recipe that would derive it.

    Raises:
        CheckpointError: a file or a tensor is missing or broken.

    """
    files = _files_of_keys(folder)
    first = getattr(steps[0], "weight", ())
    found = next((p for p in ("", prefix) if _find(files, p, first)), None)
    if found is None:
        tried = " or ".join(p + key for p in dict.fromkeys(("", prefix)) for key in first)
        missing = tried or "is named by the first step"
        raise CheckpointError(f"{folder}: no tensor {missing}; do the files belong together?")
    prefix = found
    tensors: dict[str, Tensor] = {}
    stored: list[str] = []
    sized: list[Step] = []
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def read(keys: tuple[str, ...]) -> Tensor | None:
            key = _find(files, prefix, keys)
            if key is None:
                return None
            file = files[key]
            if file not in opened:
                opened[file] = stack.enter_context(_open(file))
            try:
                tensor: Tensor = opened[file].get_tensor(key)
            except SafetensorError as error:
                raise CheckpointError(f"{file}: {one_line(error)}") from error
            if tensor.dtype not in PLAIN:  # float8 needs a scale, and float64 would be rounded
                allowed = ", ".join(map(str, PLAIN))
                raise CheckpointError(f"{folder}: tensor {key} is {tensor.dtype}, allowed {allowed}")
            stored.append(str(tensor.dtype).removeprefix("torch."))
            return tensor.to(torch.float32)

        for name, step in zip(names_of(tuple(steps)), steps, strict=True):
            if not isinstance(step, Tokens | Segments | Positions | Norm | Project):
                sized.append(step)
                continue
            weight = read(step.weight)
            if weight is not None:
                tensors[f"{name}.weight"] = weight
            elif not (isinstance(step, Positions) and step.table != "learned"):
                raise CheckpointError(f"{folder}: no tensor {prefix}{step.weight[0]}")
            if isinstance(step, Norm | Project) and step.bias is not None:
                bias = read(step.bias)
                if bias is None:
                    raise CheckpointError(f"{folder}: no tensor {prefix}{step.bias[0]}")
                tensors[f"{name}.bias"] = bias
            sized.append(step if weight is None else _size(step, weight))
    return tuple(sized), tensors, stored[0]


def _with_rotary(
    config: FrontEndConfig, folder: Path, prefix: str, values: Mapping[str, Any], length: int | None
) -> FrontEndConfig:
    """Return `config` with the rotary outputs of its family, or with the reason why they are left out."""
    row = find_rotary(config.family, values)
    refused = None
    if row is None:
        refused = f"{config.family!r} here has no rotary positions"
    else:
        try:
            outputs = read_rotary(row, values, config.widths[-1], config.max_len or 0, length)
        except LengthMissing as error:
            return replace(config, no_rotary=one_line(error))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"config.json: {one_line(error)}") from error
        if not any(output.config.length for output in outputs):
            refused = f"the angles of {config.family!r} here do not depend on it"
    if refused and length is not None:
        raise CheckpointError(f"--rotary-length: got {length}, allowed none: {refused}")
    if row is None:
        return config
    tensor = _read_tensor(folder, prefix, row.tensors)
    if tensor is not None:
        try:
            stored = [as_stored(output, tensor) for output in outputs]
        except ValueError as error:
            raise CheckpointError(f"{folder}: tensors and config.json disagree: {one_line(error)}") from error
        outputs = tuple(output for output in stored if output is not None)
        if len(outputs) < len(stored):
            return replace(config, no_rotary=f"the table {row.tensors[0]} in the file is another than its formula's")
    return replace(config, rotary=outputs)


def _read_tensor(folder: Path, prefix: str, keys: tuple[str, ...]) -> Tensor | None:
    """Return a tensor as float32, or None where the files do not have it."""
    files = _files_of_keys(folder)
    key = _find(files, "", keys) or _find(files, prefix, keys)
    if key is None:
        return None
    with _open(files[key]) as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor.to(torch.float32)


def _size(step: Step, weight: Tensor) -> Step:
    match step:
        case Tokens():
            return replace(step, rows=weight.shape[0], width=weight.shape[-1])
        case Segments():
            return replace(step, rows=weight.shape[0])
        case Positions():
            return replace(step, rows=weight.shape[0], table="learned")
        case Project():
            return replace(step, width=weight.shape[0])
        case _:
            return step


def _configure(name: str, family: Family, values: Mapping[str, Any], steps: tuple[Step, ...]) -> FrontEndConfig:
    config = Config(values)
    positions = next((step for step in steps if isinstance(step, Positions)), None)
    max_len = limit_of(positions) if positions else config(*family.limit) if family.limit else None
    frontend = FrontEndConfig(
        family=name,
        steps=steps,
        max_len=max_len,
        padding_idx=_padding(config("pad_token_id", family.padding), steps),
        refused_ids=tuple(family.refused(config)),
        lookup=len(steps) if family.lookup(config) == ALL else family.lookup(config),
        consumer_scales=family.consumer_scales,
    )
    _check_sizes(values, frontend)
    return frontend


def _padding(stated: Any, steps: tuple[Step, ...]) -> Any:
    """Some files state -1, or an id beyond the table, for none; only where positions depend on it is that a fault."""
    rows = steps[0].rows if isinstance(steps[0], Tokens) else 0
    counted = any(isinstance(step, Positions) and step.counts == "ids" for step in steps)
    return stated if counted or (type(stated) is int and 0 <= stated < rows) else None


def limit_of(positions: Positions | None) -> int | None:
    """Return max_len as positions allow it: the rows of their table, or the range in which computed ones are exact."""
    if positions is None:
        return None
    return (positions.rows or POSITIONS) - positions.first


def _check_sizes(values: Mapping[str, Any], frontend: FrontEndConfig) -> None:
    """Compare the sizes that `config.json` states with those of the tensors."""
    for keys, sizes_of in SIZES:
        allowed = sizes_of(frontend)
        for key in keys:
            stated = values.get(key)
            if stated is not None and allowed and (type(stated) is not int or stated not in allowed):
                raise ValueError(f"{key} is {stated!r}, the tensors have {' or '.join(map(str, sorted(allowed)))}")
    if frontend.max_len is not None and (type(frontend.max_len) is not int or frontend.max_len < 1):
        raise ValueError(f"the longest input is {frontend.max_len!r}, allowed 1 or more")


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
        raise CheckpointError(f"{file}: {one_line(error)}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent}: no {file.name}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return document


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())
