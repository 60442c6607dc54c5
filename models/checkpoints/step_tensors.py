"""The tensors of a list of steps, read from safetensors files."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from preblock.models.checkpoints.divided_tensors import find_whole
from preblock.models.checkpoints.ngram_tensors import check_hash, read_ngram_tables
from preblock.models.checkpoints.other_names import describe_other_name
from preblock.models.checkpoints.weight_files import (
    CheckpointError,
    WeightFile,
    files_of_keys,
    find_key,
    is_sharded,
)
from preblock.models.frontend_data import STORED, Array
from preblock.models.frontend_file import WEIGHTS
from preblock.models.modules.bias import BiasConfig, T5Config
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.per_layer_config import PerLayerConfig
from preblock.models.serialization import Keys
from preblock.models.steps import Levels, Positions, Project, Segments, Step, Tokens, Weights, names_of, parameters

PART = 2**25
"""Numbers per chunk of a conversion to float32."""

ByteCount = Callable[[int], None]


def read_tensors(
    folder: Path,
    steps: Sequence[Step],
    prefix: str = "",
    pairwise: BiasConfig | None = None,
    count_bytes: ByteCount = lambda *_: None,
    widen: bool = True,
    per_layer: PerLayerConfig | None = None,
    ngrams: NgramConfig | None = None,
    known: Collection[str] = (),
) -> tuple[tuple[Step, ...], dict[str, Array], Any]:
    """Return `steps` with their sizes, all tensors (bias included), and the stored type of the first tensor.

    The tensors are float32, except where `widen` is False as in `read_frontend`, under the names of
    `FrontEnd.state_dict()`. Every name in the files may have `prefix` before it. A table of positions in the file
    wins over a derived one. Tensors with `known` names may stand beside the ones read.

    Raises:
        CheckpointError: a file or a tensor is missing or broken.

    """
    files = files_of_keys(folder)
    _check_table(folder, files, steps, prefix, known)
    tables = [part for parts in ngrams.weights for part in parts] if ngrams else []
    known = {*known, *(key for keys in (*_keys_of(steps), *tables) for key in keys)}
    tensors: dict[str, Array] = {}
    sized: list[Step] = []
    reader = TensorReader(folder, files, prefix, known, count_bytes, widen)
    for name, step in zip(names_of(tuple(steps)), steps, strict=True):
        own = reader.read_step(name, step)
        tensors |= {f"{name}.{parameter}": tensor for parameter, tensor in own.items()}
        sized.append(_size(step, own, sized))
    if isinstance(pairwise, T5Config):
        tensors["bias.weight"] = reader.require(pairwise.weight)
    for name, keys in zip(("tokens", "project", "norm"), per_layer.weights if per_layer else (), strict=False):
        tensors[f"per_layer.{name}.weight"] = reader.require(keys, table=name == "tokens")
    if ngrams:
        if not ngrams.referenced:
            tensors |= read_ngram_tables(folder, ngrams, lambda keys: reader.read(keys, table=True))
        check_hash(files, prefix, ngrams, len(tensors["tokens.weight"]))
    assert reader.first_dtype is not None
    return tuple(sized), tensors, reader.first_dtype


@dataclass
class TensorReader:
    """Reads tensors of a checkpoint by their names; the header of each file is read once.

    Args:
        folder: the checkpoint, for messages.
        files: file of each tensor.
        prefix: before every name.
        known: keys of the front-end: none is a part of another.
        count_bytes: as in `read_frontend`.
        widen: as in `read_frontend`.
        first_dtype: name of the stored type of the first tensor; None before it is read.

    """

    folder: Path
    files: Mapping[str, Path]
    prefix: str = ""
    known: Collection[str] = ()
    count_bytes: ByteCount = lambda _: None
    widen: bool = True
    first_dtype: str | None = None

    def __post_init__(self) -> None:
        self._opened: dict[Path, WeightFile] = {}

    def read_step(self, name: str, step: Step) -> dict[str, Array]:
        """Return the tensors of a step by their parameters; a derived table of positions may be missing."""
        own: dict[str, Array] = {}
        derived = isinstance(step, Positions) and step.table not in STORED
        for parameter, (keys, _) in parameters(step).items():
            tensor = self.read(keys, table=isinstance(step, Tokens))
            if tensor is not None:
                own[parameter] = tensor
            elif not derived:
                raise self._missing(keys, f"{name}.{parameter}")
        return own

    def require(self, keys: Keys, table: bool = False) -> Array:
        """Return a tensor as `read` does; raise CheckpointError without one."""
        tensor = self.read(keys, table)
        if tensor is None:
            raise self._missing(keys)
        return tensor

    def read(self, keys: Keys, table: bool = False) -> Array | None:
        """Return the tensor with the first of the names `keys` in the files, or None; a `table` has rows and a width.

        Raises:
            CheckpointError: the file or the tensor is broken, or its values are divided among several tensors.

        """
        key = find_whole(self.folder, self.files, self.prefix, keys, self.known)
        if key is None:
            return None
        file = self.files[key]
        if file not in self._opened:
            self._opened[file] = WeightFile(file)
        tensor = self._opened[file].get(key)
        if not tensor.ndim or (table and tensor.ndim != 2):
            expected = "[rows, width]" if table else "at least one dimension"
            raise CheckpointError(
                f"{self.folder}: tensor {key} has the shape {list(tensor.shape)}, expected {expected}"
            )
        self.first_dtype = self.first_dtype or tensor.dtype.name
        if tensor.dtype == np.float32 or (table and not self.widen and tensor.size > PART):
            return tensor
        return _convert(self._opened[file], key, tensor, self.count_bytes)

    def _missing(self, keys: Keys, parameter: str = "") -> CheckpointError:
        missing = _in_words(self.prefix, keys) or f"is named by {parameter}"
        return CheckpointError(f"{self.folder}: no tensor {missing}")


def files_of_steps(
    folder: Path,
    steps: Sequence[Step],
    prefix: str = "",
    companions: Sequence[Keys] = (),
    known: Collection[str] = (),
) -> list[str]:
    """Return the names of the weight files with the tensors of `steps` and `companions`, from the index."""
    if not is_sharded(folder):
        return [WEIGHTS]
    files = files_of_keys(folder)
    _check_table(folder, files, steps, prefix, known)
    found = [find_key(files, prefix, keys) for keys in (*_keys_of(steps), *companions)]
    return sorted({files[key].name for key in found if key})


def _keys_of(steps: Sequence[Step]) -> list[Keys]:
    """Return the names of the tensors of all steps."""
    return [parameter.keys for step in steps for parameter in parameters(step).values()]


def _check_table(
    folder: Path, files: Mapping[str, Path], steps: Sequence[Step], prefix: str, known: Collection[str]
) -> None:
    """Raise CheckpointError if the files have no token table, or a divided one."""
    keys, own = getattr(steps[0], "weight", ()), {key for keys in _keys_of(steps) for key in keys}
    if find_whole(folder, files, prefix, keys, {*known, *own}) is None:
        missing = _in_words(prefix, keys) or "is named by the first step"
        names = [start + key for start in ("", prefix) for key in keys]
        found = describe_other_name(files, names) or "do the files belong together?"
        raise CheckpointError(f"{folder}: no tensor {missing}; {found}")


def _in_words(prefix: str, keys: Keys) -> str:
    """Return all names of a tensor in words."""
    return " or ".join(p + key for p in dict.fromkeys(("", prefix)) for key in keys)


def _convert(weights: WeightFile, key: str, tensor: Array, count_bytes: ByteCount) -> Array:
    """Return `tensor` as float32; a large one is read again from its file in chunks."""
    if tensor.size <= PART:
        return tensor.astype(np.float32)
    converted = np.empty(tensor.shape, np.float32)
    rows = max(1, PART // tensor[0].size)
    for begin in range(0, len(tensor), rows):
        # One mapping for each chunk, because pages stay in memory as long as their mapping.
        part = weights.get(key, rows=slice(begin, begin + rows))
        converted[begin : begin + rows] = part
        count_bytes(part.nbytes)
    return converted


def _size(step: Step, own: Mapping[str, Array], before: Sequence[Step]) -> Step:
    """Return `step` with the sizes of its tensors, or of the steps before it."""
    match step:
        case Tokens():
            return replace(step, rows=own["weight"].shape[0], width=own["weight"].shape[-1])
        case Segments(table="tokens"):
            tokens = before[0]
            return replace(step, rows=tokens.rows) if isinstance(tokens, Tokens) else step
        case Segments() | Weights():
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
