"""Files of a checkpoint: `config.json`, and safetensors files with or without an index."""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from safetensors import SafetensorError, safe_open

from preblock.models.checkpoints.other_names import describe_other_weights
from preblock.models.frontend_file import INDEX, STORED_TYPES, WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the file that a clone holds in place of a large one, until `git lfs pull`."""


class CheckpointError(ValueError):
    """The folder is not a supported checkpoint; the message gives the reason."""


def is_sharded(folder: Path) -> bool:
    """Return whether the index of `folder` names the files. A single file beside it wins, as in transformers."""
    return os.path.lexists(folder / INDEX) and not os.path.lexists(folder / WEIGHTS)


def files_of_keys(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in `folder`, as transformers finds them."""
    if is_sharded(folder):
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX}: no weight_map of tensors to files")
        for file in set(weight_map.values()):
            if Path(file).name != file or "\0" in file:
                raise CheckpointError(f"{folder / INDEX}: got {file!r}, expected the name of a file in its folder")
        return {key: folder / file for key, file in weight_map.items()}
    if os.path.lexists(folder / WEIGHTS):
        with open_weights(folder / WEIGHTS) as weights:
            return dict.fromkeys(weights.keys(), folder / WEIGHTS)
    found = describe_other_weights(folder)
    raise CheckpointError(f"{folder}: neither {WEIGHTS} nor {INDEX}{found and ', ' + found}")


def open_weights(file: Path) -> Any:
    """Open a safetensors file to read its tensors one by one; raise CheckpointError as `check_file` does."""
    check_file(file)  # first: safetensors calls every failure "no such file", and waits for the writer of a pipe
    try:
        return _open(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from error


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except RuntimeError as error:
        if "unable to mmap" not in str(error):
            raise
        # A command on a folder without such a file does not import torch.
        from preblock.models.checkpoints.unmapped_weights import UnmappedWeights

        return UnmappedWeights(file)


def get_tensor(weights: Any, key: str, file: Path, types: Sequence[str] = STORED_TYPES) -> "Tensor":
    """Return one tensor of `file`, opened by `open_weights`, in its stored type: one of `types`."""
    try:
        tensor: Tensor = weights.get_tensor(key)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from error
    if str(tensor.dtype) not in types:
        allowed = ", ".join(types)
        raise CheckpointError(f"{file.parent}: tensor {key} is {tensor.dtype}, expected {allowed}")
    return tensor


def find_key(files: Mapping[str, Path], prefix: str, keys: tuple[str, ...]) -> str | None:
    """Return the first of `keys` found in the files, with `prefix` before it or without; None without one.

    Of a key with and without the prefix, the one first in the alphabet counts, as in transformers.
    """
    names = (name for key in keys for name in sorted((prefix + key, key)))
    return next((name for name in names if name in files), None)


def read_document(file: Path) -> Any:
    """Return the JSON value in `file`; raise CheckpointError as `read_bytes`, and for NaN and infinity."""
    content = read_bytes(file)
    try:
        return json.loads(content, parse_float=finite_float, parse_constant=finite_float)
    except RecursionError as error:
        raise CheckpointError(f"{file}: lists or objects are nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`."""
    document = read_document(file)
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return document


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json`; raise CheckpointError if it names a weight file of its own."""
    config = read_json(folder / "config.json")
    if (other := config.get("transformers_weights")) is not None:
        raise CheckpointError(f"config.json: transformers_weights is {other!r}, expected none: rename it to {WEIGHTS}")
    return config


def finite_float(text: str) -> float:
    """Return the number in `text`; raise ValueError unless it is finite."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"got the number {text}, expected finite numbers")
    return value


def read_bytes(file: Path) -> bytes:
    """Return the content of `file`; raise CheckpointError as `check_file` does."""
    check_file(file)
    try:
        return file.read_bytes()
    except OSError as error:
        _refuse(file, error)


def check_file(file: Path) -> None:
    """Check a file of a checkpoint: regular, readable, complete, and in its folder.

    Raises:
        CheckpointError: it is missing, unreadable, a pipe or device, a pointer of Git LFS, or a link out of its folder.
            Only links within a hub's cache, from `snapshots` to `blobs`, may leave the folder.

    """
    try:
        target = Path(os.path.realpath(file, strict=True))
        if not any(target.is_relative_to(root) for root in _roots(file.parent.resolve())):
            raise CheckpointError(f"{file}: a link to {target}, outside the folder; replace it by a copy of that file")
        if not stat.S_ISREG(target.stat().st_mode):
            raise CheckpointError(f"{file}: a folder, pipe or device, expected a regular file")
        with target.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise CheckpointError(f"{file}: a pointer of Git LFS, expected the file itself; run `git lfs pull`")
    except OSError as error:
        _refuse(file, error)


def _roots(folder: Path) -> Iterator[Path]:
    """Yield the allowed places of the files of `folder`."""
    yield folder
    for snapshot in (folder, *folder.parents):
        if snapshot.parent.name == "snapshots":
            yield snapshot.parent.parent / "blobs"


def _refuse(file: Path, error: OSError) -> NoReturn:
    if isinstance(error, FileNotFoundError) and not os.path.lexists(file):
        raise CheckpointError(f"{file.parent}: no {file.name}") from error
    raise CheckpointError(f"{file}: {(error.strerror or 'unreadable').lower()}") from error


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())
