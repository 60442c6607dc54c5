"""Reads a static embedding model of a library, by the rows of `STATICS`.

Letters: V token ids, N rows and D width of the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from preblock.models.checkpoints.divided_tensors import find_whole
from preblock.models.checkpoints.other_names import describe_other_name
from preblock.models.checkpoints.static_families import STATICS, StaticFamily, StaticLayout
from preblock.models.checkpoints.weight_files import (
    CheckpointError,
    WeightFile,
    one_line,
    read_json,
)
from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import Array, FrontEndData
from preblock.models.frontend_file import STORED_TYPES
from preblock.models.steps import Step, Tokens, Weights

TABLE_TYPES = (*STORED_TYPES, "int8")
WEIGHT_TYPES = (*STORED_TYPES, "float64")
"""Allowed types: all are float32 afterwards. The weights of model2vec are float64 if its statistics are."""
MAPPING_TYPES = ("int64", "int32")


@dataclass(frozen=True, kw_only=True)
class StaticModel:
    """A static embedding model.

    Args:
        frontend: the vector of each token.
        normalize: whether the mean is divided by its Euclidean norm.
        ignored_ids: ids left out of the mean.

    """

    frontend: FrontEndData
    normalize: bool
    ignored_ids: tuple[int, ...]


def read_static(folder: Path, layout: StaticLayout) -> StaticModel:
    """Build the front-end of the static embedding model in `folder`: the table, and the weights if the file has them.

    Rows shared by several ids through a mapping are repeated, so that the front-end has a row for each id.

    Raises:
        CheckpointError: a file is missing or broken, or two of them disagree.

    """
    family, tokenizer = STATICS[layout.name], read_json(folder / layout.tokenizer)
    tensors = _read_tensors(folder / layout.weights, family)
    table = tensors["tokens.weight"]
    try:
        last = _last_id(tokenizer)
        unknown = _unknown_id(tokenizer) if family.drops_unknown else None
        limit = family.limit(layout.config, tokenizer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{layout.tokenizer}: no file of the package tokenizers") from error
    if last >= len(table):
        raise CheckpointError(
            f"{folder}: tensors and tokenizer disagree: the tokenizer has the id {last}, the tensors end at "
            f"{len(table) - 1}"
        )
    steps: list[Step] = [Tokens(rows=len(table), width=table.shape[1])]
    if "weights.weight" in tensors:
        steps.append(Weights(rows=len(table)))
    try:
        config = FrontEndConfig(
            family=layout.name, steps=tuple(steps), max_len=limit, lookup=len(steps), consumer_scales=False
        )
        frontend = FrontEndData(config, tensors).check()
    except ValueError as error:
        raise CheckpointError(f"{folder}: {one_line(error)}") from error
    ignored = () if unknown is None else (unknown,)
    return StaticModel(frontend=frontend, normalize=layout.normalize, ignored_ids=ignored)


def static_files_needed(layout: StaticLayout) -> list[str]:
    """Return the files opened by `read_static`, relative to its folder; they need not exist yet."""
    return [layout.weights, layout.tokenizer]


def _read_tensors(file: Path, family: StaticFamily) -> dict[str, Array]:
    """Return the table, float32 (V, D), and the weights, float32 (V, 1), if the file has them."""
    if not file.is_file():
        raise CheckpointError(f"{file.parent}: no {file.name}")
    weights = WeightFile(file)
    names = weights.keys()
    key = find_whole(file.parent, names, "", family.tables, ("mapping", "weights"))
    if key is None:
        found = describe_other_name(names, family.tables)
        raise CheckpointError(f"{file}: no tensor {' or '.join(family.tables)}{found and '; ' + found}")
    table = weights.get(key, TABLE_TYPES)
    mapping = weights.get("mapping", MAPPING_TYPES) if "mapping" in names else None
    factors = weights.get("weights", WEIGHT_TYPES) if "weights" in names else None
    _check_shape(file, key, table, 2)
    if mapping is not None:
        _check_shape(file, "mapping", mapping, 1)
        if not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
            raise CheckpointError(f"{file}: mapping leads beyond the {len(table)} rows of {key}")
        table = table[mapping]
    tensors = {"tokens.weight": table.astype(np.float32, copy=False)}
    if factors is not None:
        _check_shape(file, "weights", factors, 1)
        if len(factors) != len(table):
            raise CheckpointError(f"{file}: weights has {len(factors)} values, expected {len(table)}, one for each id")
        tensors["weights.weight"] = factors.astype(np.float32, copy=False).reshape(-1, 1)
    return tensors


def _check_shape(file: Path, key: str, tensor: Array, dimensions: int) -> None:
    if tensor.ndim != dimensions or not tensor.size:
        raise CheckpointError(
            f"{file}: {key} has the shape {tuple(tensor.shape)}, expected {dimensions} dimensions of 1 or more"
        )


def _last_id(tokenizer: Mapping[str, Any]) -> int:
    """Return the largest id of a tokenizer, without those of added tokens, which only some texts need."""
    vocabulary = tokenizer["model"]["vocab"]
    return int(max(vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]))


def _unknown_id(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the id of the unknown token; None for a tokenizer without one.

    Unigram states its id, every other kind its text.
    """
    model = tokenizer["model"]
    if isinstance(model["vocab"], list):
        stated: int | None = model.get("unk_id")
        return stated
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    found: int | None = (model["vocab"] | added).get(model.get("unk_token"))
    return found
