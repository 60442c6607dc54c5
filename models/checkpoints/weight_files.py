"""Files of a checkpoint: `config.json`, and safetensors files with or without an index."""

import json
import math
import mmap
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from preblock.models.checkpoints.other_names import describe_other_weights
from preblock.models.frontend_file import INDEX, STORED_TYPES, WEIGHTS
from preblock.service.artifacts.safetensors_header import TYPES, read_header
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import is_inside

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the file that a clone holds in place of a large one, until `git lfs pull`."""
PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Flags of a mapping. Without the second, Linux refuses to map a file larger than the memory, to be written privately.
Python names it from 3.13 on."""


DISAGREE = "tensors and config.json disagree"
DAMAGED = (TypeError, ValueError, ArithmeticError)
"""Errors for a value of a wrong type or size."""


class CheckpointError(ValueError):
    """The folder is not a supported checkpoint; the message gives the reason."""


def is_sharded(folder: Path) -> bool:
    """Return whether the index of `folder` names the files. A single file beside it wins, as in transformers."""
    return os.path.lexists(folder / INDEX) and not os.path.lexists(folder / WEIGHTS)


def describe_second_source(folder: Path) -> str:
    """Return a warning about an index of other files beside a single weight file; empty without both."""
    if not (os.path.lexists(folder / WEIGHTS) and os.path.lexists(folder / INDEX)):
        return ""
    with suppress(CheckpointError):
        if set(_read_index(folder).values()) == {WEIGHTS}:
            return ""
    return (
        f"{folder}: {WEIGHTS} and {INDEX} both name the weights; this export reads {WEIGHTS} alone, as transformers "
        "does; remove the one that is stale"
    )


def files_of_keys(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in `folder`, as transformers finds them."""
    if is_sharded(folder):
        return {key: folder / file for key, file in _read_index(folder).items()}
    if os.path.lexists(folder / WEIGHTS):
        return dict.fromkeys(WeightFile(folder / WEIGHTS).keys(), folder / WEIGHTS)
    found = describe_other_weights(folder)
    raise CheckpointError(f"{folder}: neither {WEIGHTS} nor {INDEX}{found and ', ' + found}")


def _read_index(folder: Path) -> dict[str, str]:
    """Return the name of the file of each tensor in the index of `folder`."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX}: no weight_map of tensors to files")
    for file in set(weight_map.values()):
        if Path(file).name != file or "\0" in file:
            raise CheckpointError(f"{folder / INDEX}: got {file!r}, expected the name of a file in its folder")
    return weight_map


class WeightFile:
    """The tensors of a safetensors file, each mapped when it is read: its pages enter the memory as they are used.

    Raises:
        CheckpointError: as `check_file`, or the file is no safetensors file.

    """

    def __init__(self, file: Path) -> None:
        check_file(file)  # first: opening a pipe waits for its writer
        self._file = file
        try:
            with file.open("rb") as stream:
                self._state = _state_of(stream)
                self._tensors = read_header(str(file), stream).tensors
        except ArtifactError as error:
            raise CheckpointError(one_line(error)) from error
        except OSError as error:
            _refuse(file, error)

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._tensors)

    def get(self, key: str, types: Sequence[str] = STORED_TYPES, rows: slice = slice(None)) -> NDArray[Any]:
        """Return a tensor in its stored type, or some consecutive rows of it. Writing does not change the file.

        Raises:
            CheckpointError: there is no such tensor, its type is none of `types`, its bytes do not fit its shape, or
                the file changed since its header was read.

        """
        if key not in self._tensors:
            raise CheckpointError(f"{self._file}: no tensor {key}")
        stored, shape, begin, end = self._tensors[key]
        dtype = TYPES.get(stored)
        if dtype is None or dtype.name not in types:
            got, allowed = dtype.name if dtype else stored, ", ".join(types)
            raise CheckpointError(f"{self._file.parent}: tensor {key} is {got}, expected {allowed}")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{self._file}: tensor {key} has {end - begin} bytes, expected {list(shape)} {dtype}")
        if rows != slice(None):
            first, last, _ = rows.indices(shape[0])
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            begin, end, shape = begin + first * row_bytes, begin + last * row_bytes, (last - first, *shape[1:])
        try:
            tensor = _map(self._file, self._state, begin, end - begin).view(dtype).reshape(shape)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._file}: tensor {key}: {one_line(error)}") from error
        return tensor if tensor.flags.aligned else tensor.copy()


def _state_of(stream: BufferedReader) -> tuple[int, ...]:
    """Return numbers that change with the content of an open file, and with another file in its place."""
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _map(file: Path, state: tuple[int, ...], begin: int, count: int) -> NDArray[np.uint8]:
    """Return `count` bytes of `file` from byte `begin`; a page that is written becomes a copy of this process.

    Raises:
        ValueError: the file has another state than `state`.

    """
    if not count:
        return np.empty(0, np.uint8)
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length, access = begin - start + count, mmap.PROT_READ | mmap.PROT_WRITE
    with file.open("rb") as stream:
        if _state_of(stream) != state:
            raise ValueError("the file changed while it was read")
        mapping = mmap.mmap(stream.fileno(), length, flags=PRIVATE, prot=access, offset=start)
    return np.frombuffer(mapping, np.uint8, count, begin - start)


def names_of_key(prefix: str, keys: tuple[str, ...]) -> list[str]:
    """Return the possible names of a tensor in the order in which they count: `keys`, with `prefix` and without.

    Of a key with and without the prefix, the one first in the alphabet counts, as in transformers.
    """
    return [name for key in keys for name in sorted({prefix + key, key})]


def find_key(files: Mapping[str, Path], prefix: str, keys: tuple[str, ...]) -> str | None:
    """Return the name of a tensor in the files; None without one."""
    return next((name for name in names_of_key(prefix, keys) if name in files), None)


def read_document(file: Path) -> Any:
    """Return the JSON value in `file`; raise CheckpointError as `read_bytes`, and for NaN and infinity."""
    content = read_bytes(file)
    try:
        return json.loads(content, parse_float=finite_float, parse_constant=finite_float)
    except RecursionError as error:
        raise CheckpointError(f"{file}: lists or objects are nested too deeply") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file}: not valid JSON: {one_line(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`."""
    document = read_document(file)
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return document


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json`; raise CheckpointError if it names another file, which transformers would read."""
    config = read_json(folder / "config.json")
    for key, place in (("transformers_weights", WEIGHTS), ("configuration_files", "config.json")):
        if (other := config.get(key)) not in (None, []):
            raise CheckpointError(f"config.json: {key} is {other!r}, expected none: rename the right file to {place}")
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
            Only links within one hub cache, from `snapshots` to `blobs`, may leave the folder.

    """
    try:
        target = Path(os.path.realpath(file, strict=True))
        if not is_inside(target, [file.parent]):
            raise CheckpointError(f"{file}: a link to {target}, outside the folder; replace it by a copy of that file")
        if not stat.S_ISREG(target.stat().st_mode):
            raise CheckpointError(f"{file}: a folder, pipe or device, expected a regular file")
        with target.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise CheckpointError(f"{file}: a pointer of Git LFS, expected the file itself; run `git lfs pull`")
    except OSError as error:
        _refuse(file, error)


def check_place(folder: Path, part: str, record: str) -> None:
    """Raise CheckpointError, which begins with `record`, for a part of `folder` outside it, also by a link."""
    steps, target = Path(part).parts, Path(os.path.realpath(folder / part))
    if Path(part).is_absolute() or ".." in steps or not is_inside(target, [folder]):
        raise CheckpointError(f"{record}: the path {part!r} lies outside the folder")


def _refuse(file: Path, error: OSError) -> NoReturn:
    if isinstance(error, FileNotFoundError) and not os.path.lexists(file):
        raise CheckpointError(f"{file.parent}: no {file.name}") from error
    raise CheckpointError(f"{file}: {(error.strerror or 'unreadable').lower()}") from error


@contextmanager
def explain_errors(place: object, kinds: tuple[type[Exception], ...] = DAMAGED) -> Iterator[None]:
    """Raise CheckpointError in place of an error of `kinds`, with `place` before its message."""
    try:
        yield
    except CheckpointError:
        raise
    except kinds as error:
        raise CheckpointError(f"{place}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())
