"""Reads the front-end of a published checkpoint: `config.json` and safetensors files, by the family table."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from preblock.models.checkpoints.attention_families import LengthMissing, as_stored, bias_of, find_rotary, read_rotary
from preblock.models.checkpoints.families import ALL, FAMILIES, SIZES, Config, Family, known, sides_of
from preblock.models.frontend import FrontEnd, FrontEndConfig, names_of
from preblock.models.modules.bias import BiasConfig, T5Config
from preblock.models.steps import Keys, Levels, Positions, Project, Segments, Step, Tokens, parameters

PLAIN = (torch.float32, torch.float16, torch.bfloat16)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PART = 2**25
"""Numbers that are converted at once."""
STORED = ("learned", "hybrid", "factorised")
"""Tables of positions that no recipe derives."""


Told = Callable[[int], None]


class CheckpointError(ValueError):
    """A folder that is not a checkpoint whose front-end is understood. The message says why."""


def read_frontend(
    folder: Path,
    side: str | None = None,
    arithmetic: Literal["float32", "source"] = "float32",
    segments: bool = False,
    rotary_length: int | None = None,
    told: Told = lambda *_: None,
    widen: bool = True,
) -> FrontEnd:
    """Build the front-end of the checkpoint in `folder`, with float32 tensors, reading no other tensor.

    Tensors that are float32 in the file are mapped from it, not read.

    Args:
        folder: holds `config.json` and safetensors files.
        side: "encoder" or "decoder" of a model that has both, "text" of one that has images too; None for one that has
            no sides.
        arithmetic: "source" rounds after every step to the type of the token table in the file, as a library does that
            loads the model in that type; default float32, in which every type of file is exact.
        segments: in families where segments are rows of the token table, which a library adds only when it is given
            segments, add them always; default False, never.
        rotary_length: for a rotary model whose frequencies depend on it (rope types "dynamic" and "longrope"), tokens
            of the whole sequence; default None, which leaves the rotary outputs of such a model out.
        told: is told the bytes of each part that was converted to float32; default nobody.
        widen: default True; False leaves a large table of tokens, mapped, in the type that it has in the file, for who
            reads it part by part. The front-end cannot run then.

    Raises:
        CheckpointError: a file is missing or broken, the family is not known, or its values are not understood.

    """
    name, family, values, template, bias = _read_config(folder, side, segments)
    steps, tensors, stored = read_tensors(folder, template, family.prefix, bias, told, widen)
    try:
        config = _configure(name, family, values, steps)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: tensors and config.json disagree: {one_line(error)}") from error
    config = _with_rotary(config, folder, family.prefix, values, rotary_length)
    try:
        return FrontEnd.from_tensors(
            replace(config, arithmetic=stored if arithmetic == "source" else "float32", bias=bias), tensors
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: tensors and config.json disagree: {one_line(error)}") from error


def files_needed(folder: Path, side: str | None = None, segments: bool = False) -> list[str]:
    """Return the names of the weight files that `read_frontend` opens; they need not be there yet.

    Raises:
        CheckpointError: as `read_frontend`.

    """
    name, family, values, template, bias = _read_config(folder, side, segments)
    rotary = find_rotary(name, values)
    companions = [bias.weight] if isinstance(bias, T5Config) else []
    companions += [rotary.tensors] if rotary else []
    return files_of_steps(folder, template, family.prefix, companions)


def files_of_steps(folder: Path, steps: Sequence[Step], prefix: str = "", companions: Sequence[Keys] = ()) -> list[str]:
    """Return the names of the weight files that hold the tensors of `steps` and `companions`, as the index has them."""
    if not (folder / INDEX).is_file():
        return [WEIGHTS]
    files = files_of_keys(folder)
    prefix = _prefix(folder, files, steps, prefix)
    wanted = [keys for step in steps for keys in parameters(step).values()]
    found = [_find(files, prefix, keys) for keys in (*wanted, *companions)]
    return sorted({files[key].name for key in found if key})


def _read_config(
    folder: Path, side: str | None, segments: bool
) -> tuple[str, Family, Mapping[str, Any], Sequence[Step], BiasConfig | None]:
    """Return the name and the row of the family, its part of `config.json`, its steps without sizes, and its bias."""
    document = read_json(folder / "config.json")
    name, family = family_of(document, side)
    values = section_of(document, family.sections)
    if segments and not family.segments:
        allowed = ", ".join(other for other, row in FAMILIES.items() if row.segments)
        raise CheckpointError(f"--segments: got {name!r}, allowed for {allowed}, whose segments are token ids")
    try:
        return name, family, values, family.steps(Config(values, segments)), bias_of(name, values)
    except TypeError as error:
        raise CheckpointError(f"config.json: a value that {name!r} needs is missing: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def section_of(document: Mapping[str, Any], sections: Sequence[str]) -> Mapping[str, Any]:
    """Return the part of `config.json` that stands under the first of `sections` that is there; all of it for none."""
    if not sections:
        return document
    key = next((key for key in sections if document.get(key) is not None), None)
    if key is None or not isinstance(document[key], dict):
        got = "is missing" if key is None else f"is {document[key]!r}"
        raise CheckpointError(f"config.json: {key or sections[-1]} {got}, allowed an object")
    section: dict[str, Any] = document[key]
    return section


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
    values = section_of(config, family.sections)
    for key, understood in family.only.items():
        if values.get(key) is not None and values[key] not in understood:
            allowed = " or ".join(map(repr, understood))
            raise CheckpointError(f"config.json: {key} is {values[key]!r}, understood is {allowed}")
    return name, family


def read_tensors(
    folder: Path,
    steps: Sequence[Step],
    prefix: str = "",
    pairwise: BiasConfig | None = None,
    told: Told = lambda *_: None,
    widen: bool = True,
) -> tuple[tuple[Step, ...], dict[str, Tensor], Any]:
    """Return `steps` with their sizes, their tensors and that of the bias, and the type that the first has in the file.

    The tensors are float32, except where `widen` is False as in `read_frontend`, under the names of
    `FrontEnd.state_dict()`. Every name in the files may have `prefix`
    before it. A table of positions that is in the file wins over the recipe that would derive it.

    Raises:
        CheckpointError: a file or a tensor is missing or broken.

    """
    files = files_of_keys(folder)
    prefix = _prefix(folder, files, steps, prefix)
    tensors: dict[str, Tensor] = {}
    stored: list[str] = []
    sized: list[Step] = []
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def read(keys: tuple[str, ...], table: bool = False) -> Tensor | None:
            key = _find(files, prefix, keys)
            if key is None:
                return None
            file = files[key]
            if file not in opened:
                opened[file] = stack.enter_context(open_weights(file))
            tensor = get_tensor(opened[file], key, file)
            stored.append(str(tensor.dtype).removeprefix("torch."))
            if table and not widen and tensor.numel() > PART:
                return tensor
            if tensor.dtype == torch.float32:  # all that are mapped share one mapping, which lives as long as any
                return tensor if widen else tensor.clone()
            return _convert(file, key, tensor, told)

        for name, step in zip(names_of(tuple(steps)), steps, strict=True):
            own: dict[str, Tensor] = {}
            for parameter, keys in parameters(step).items():
                tensor = read(keys, isinstance(step, Tokens))
                if tensor is not None:
                    own[parameter] = tensor
                elif not (isinstance(step, Positions) and step.table not in STORED):
                    missing = keys[0] if keys else f"is named by {name}.{parameter}"
                    raise CheckpointError(f"{folder}: no tensor {prefix}{missing}")
            tensors |= {f"{name}.{parameter}": tensor for parameter, tensor in own.items()}
            sized.append(_size(step, own, sized))
        if isinstance(pairwise, T5Config):
            weight = read(pairwise.weight)
            if weight is None:
                raise CheckpointError(f"{folder}: no tensor {prefix}{pairwise.weight[0]}")
            tensors["bias.weight"] = weight
    return tuple(sized), tensors, stored[0]


def _convert(file: Path, key: str, tensor: Tensor, told: Told) -> Tensor:
    """Return `tensor`, which is `key` of `file`, as float32."""
    if tensor.numel() <= PART:
        return tensor.to(torch.float32)
    converted = torch.empty(tensor.shape, dtype=torch.float32)
    rows = max(1, PART // tensor[0].numel())
    for begin in range(0, len(tensor), rows):
        # A mapping of its own for each part: what was read stays in memory for as long as its mapping.
        with open_weights(file) as weights:
            part = weights.get_slice(key)[begin : begin + rows]
            converted[begin : begin + rows] = part
            told(part.nbytes)
    return converted


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
    files = files_of_keys(folder)
    key = _find(files, "", keys) or _find(files, prefix, keys)
    if key is None:
        return None
    with open_weights(files[key]) as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor.to(torch.float32)


def _size(step: Step, own: Mapping[str, Tensor], before: Sequence[Step]) -> Step:
    """Return `step` with the sizes of its own tensors, or of the steps before it."""
    match step:
        case Tokens():
            return replace(step, rows=own["weight"].shape[0], width=own["weight"].shape[-1])
        case Segments(table="tokens"):
            tokens = before[0]
            return replace(step, rows=tokens.rows) if isinstance(tokens, Tokens) else step
        case Segments():
            return replace(step, rows=own["weight"].shape[0])
        case Levels():
            parts = (
                _size(level, {"weight": own[f"{place}.weight"]} if level.table == "own" else {}, before)
                for place, level in enumerate(step.levels)
            )
            return replace(step, levels=tuple(part for part in parts if isinstance(part, Segments)))
        case Positions() if "weight" in own:
            return replace(step, rows=own["weight"].shape[0], table="hybrid" if step.table == "hybrid" else "learned")
        case Project():
            return replace(step, width=own["weight"].shape[0])
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
    """Return max_len as positions allow it; None where there are none."""
    return positions.limit if positions else None


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


def _prefix(folder: Path, files: Mapping[str, Path], steps: Sequence[Step], prefix: str) -> str:
    """Return nothing or `prefix`, whichever the files put before the names of tensors."""
    first = getattr(steps[0], "weight", ())
    found = next((p for p in ("", prefix) if _find(files, p, first)), None)
    if found is None:
        tried = " or ".join(p + key for p in dict.fromkeys(("", prefix)) for key in first)
        missing = tried or "is named by the first step"
        raise CheckpointError(f"{folder}: no tensor {missing}; do the files belong together?")
    return found


def _find(files: Mapping[str, Path], prefix: str, keys: tuple[str, ...]) -> str | None:
    return next((prefix + key for key in keys if prefix + key in files), None)


def files_of_keys(folder: Path) -> dict[str, Path]:
    """Return which file of `folder` holds which tensor; the index decides where there is one."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX}: no weight_map of tensors to files")
        for file in set(weight_map.values()):
            if Path(file).name != file:
                raise CheckpointError(f"{folder / INDEX}: {file!r} lies outside the folder")
        return {key: folder / file for key, file in weight_map.items()}
    if (folder / WEIGHTS).is_file():
        with open_weights(folder / WEIGHTS) as weights:
            return dict.fromkeys(weights.keys(), folder / WEIGHTS)
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: only pytorch_model.bin, a pickle, which can run any code when it is read; convert it to "
            "safetensors first: load it with transformers where you trust it, then save_pretrained()"
        )
    raise CheckpointError(f"{folder}: neither {WEIGHTS} nor {INDEX}")


def open_weights(file: Path) -> Any:
    """Open a safetensors file, whose tensors are read one by one."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from error


def get_tensor(weights: Any, key: str, file: Path) -> Tensor:
    """Return one tensor of `file`, which `open_weights` opened, in the type that it has there."""
    try:
        tensor: Tensor = weights.get_tensor(key)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from error
    if tensor.dtype not in PLAIN:  # float8 needs a scale, and float64 would be rounded
        allowed = ", ".join(map(str, PLAIN))
        raise CheckpointError(f"{file.parent}: tensor {key} is {tensor.dtype}, allowed {allowed}")
    return tensor


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`."""
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
