"""The tables of n-gram embeddings in a checkpoint, and the check of their hash."""

from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from preblock.models.checkpoints.weight_files import CheckpointError, WeightFile, check_file, find_key
from preblock.models.frontend_data import Array
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.serialization import Keys

SCALES = ("_scale_inv", "_scale")
"""Endings of the name of a table for the name of its scales: `weight_scale_inv` multiplies too, despite its name."""


def read_ngram_tables(folder: Path, ngrams: NgramConfig, read: Callable[[Keys], Array | None]) -> dict[str, Array]:
    """Return the table of each layer, under the names of `FrontEnd.state_dict()`; its parts are concatenated.

    `read` returns a tensor by its names, or None.

    Raises:
        CheckpointError: a table is missing, or has another number of rows than its hash.

    """
    tensors: dict[str, Array] = {}
    for place, (parts, rows) in enumerate(zip(ngrams.weights, ngrams.table_rows, strict=True)):
        found = [part for part in map(read, parts) if part is not None]
        if not found:
            raise CheckpointError(f"{folder}: no tensor {parts[0][0]}")
        table = found[0] if len(found) == 1 else np.concatenate(found)
        if len(table) != rows:
            raise CheckpointError(
                f"{folder}: {parts[0][0]} has {len(table)} rows in {len(found)} parts, expected {rows} rows in "
                f"{len(parts) - 1} parts, as config.json states"
            )
        tensors[f"ngrams.tables.{place}.weight"] = table
    return tensors


class TableTensor(NamedTuple):
    """A part of a table: its file, the name of its tensor, and the file and name of its scales, if it has any."""

    file: Path
    key: str
    scales: tuple[Path, str] | None


def locate_ngram_tables(
    folder: Path, files: Mapping[str, Path], prefix: str, ngrams: NgramConfig
) -> tuple[tuple[TableTensor, ...], ...]:
    """Return the parts of the table of each layer among the tensors in `files`, in the order of their rows.

    Raises:
        CheckpointError: a table is missing, or one of its files is irregular, or a link out of the folder.

    """
    tables = []
    for parts in ngrams.weights:
        keys = [key for part in parts if (key := find_key(files, prefix, part))]
        if not keys:
            raise CheckpointError(f"{folder}: no tensor {parts[0][0]}")
        table = []
        for key in keys:
            scale = next((key + ending for ending in SCALES if key + ending in files), None)
            table.append(TableTensor(files[key], key, (files[scale], scale) if scale else None))
        tables.append(tuple(table))
    for file in {file for table in tables for part in table for file in (part.file, *(part.scales or ())[:1])}:
        check_file(file)
    return tuple(tables)


def check_hash(files: Mapping[str, Path], prefix: str, ngrams: NgramConfig, vocab_size: int) -> None:
    """Compare the factors and rows of the hash in the files, where they are stored, with those of the seed.

    Raises:
        CheckpointError: they differ.

    """
    multipliers = ngrams.multipliers(vocab_size)
    for parts, rows, factors in zip(ngrams.weights, ngrams.head_rows, multipliers, strict=True):
        stem = parts[0][0].removesuffix("ngram_embedding.weight")
        begins = tuple(accumulate(rows, initial=0))[:-1]
        named = {"layer_multipliers": factors, "ngram_heads_vocab_sizes": rows, "ngram_heads_offsets": begins}
        for name, expected in named.items():
            key = find_key(files, prefix, (stem + name,))
            if key is None:
                continue
            found = WeightFile(files[key]).get(key, ("int64",)).tolist()
            if found != list(expected):
                raise CheckpointError(
                    f"{files[key]}: {key} is {found}, expected {list(expected)}, as config.json states"
                )
