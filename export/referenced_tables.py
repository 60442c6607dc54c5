"""Tables in the safetensors files of their source: the record of their places, and its proof."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open

from preblock.export.errors import ExportError
from preblock.models.checkpoints.ngram_tensors import TableTensor
from preblock.models.frontend_data import FrontEndData
from preblock.models.frontend_file import STORED_TYPES
from preblock.service.artifacts.manifest import NgramTable, Reference, TablePart, TableScales
from preblock.service.artifacts.safetensors_header import TYPES, Header, StoredTensor, read_header
from preblock.service.core.errors import ArtifactError

FLOAT8 = "float8_e4m3fn"
BLOCK = 128
"""Rows and columns of a block with one scale in a table of float8, as in the models of DeepSeek and Qwen."""


@dataclass(frozen=True)
class ReferencedTables:
    """The n-gram tables of all layers, and the files with their rows by absolute path."""

    tables: tuple[NgramTable, ...] = ()
    references: Mapping[str, Reference] = field(default_factory=dict)


class _File:
    """A file of the source: its record, and its tensors."""

    def __init__(self, file: Path) -> None:
        self.path = os.path.realpath(file)
        if "," in self.path:  # of the setting `reference_roots`
            raise ExportError(f"--reference: got {self.path}, expected a path without commas: they separate folders")
        try:
            with Path(self.path).open("rb") as stream:
                status = os.fstat(stream.fileno())
                header: Header = read_header(str(file), stream)
        except OSError as error:
            raise ExportError(f"{file}: {error.strerror}") from error
        except ArtifactError as error:
            raise ExportError(str(error)) from error
        self.tensors = header.tensors
        self.record = Reference(
            bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            header_sha256=header.sha256,
            sha256=_published_hash(Path(self.path)),
        )


def reference_tables(tables: Sequence[Sequence[TableTensor]], frontend: FrontEndData) -> ReferencedTables:
    """Return the places of the n-gram tables of `frontend`, with tensors of safetensors files as their parts.

    Some rows of each part are read by the safetensors library too, and compared, except in types unknown to NumPy.

    Raises:
        ExportError: a tensor is missing, or has another type or shape than those of `frontend`.

    """
    config = frontend.config.ngrams
    assert config is not None
    width = config.width // config.heads_of_layer
    places = [place for table in tables for part in table for place in (part.file, *(part.scales or ())[:1])]
    files = {file: _File(file) for file in dict.fromkeys(places)}
    found = []
    for parts, rows in zip(tables, config.table_rows, strict=True):
        located = [_locate(part, width, files) for part in parts]
        total, dtypes = sum(part.rows for _, part in located), dict.fromkeys(dtype for dtype, _ in located)
        if total != rows:
            raise ExportError(f"{parts[0].key}: got {total} rows in {len(parts)} parts, expected {rows}")
        if len(dtypes) > 1:
            raise ExportError(f"{parts[0].key}: got the types {', '.join(dtypes)}, expected one type for all parts")
        dtype = next(iter(dtypes))
        table = NgramTable.model_validate(
            {"rows": rows, "width": width, "dtype": dtype, "parts": tuple(part for _, part in located)}
        )
        for tensor, part in zip(parts, table.parts, strict=True):
            if dtype != FLOAT8:
                _compare_rows(tensor, part, width * TYPES[_find(files, tensor.file, tensor.key).dtype].itemsize)
        found.append(table)
    return ReferencedTables(tuple(found), {file.path: file.record for file in files.values()})


def _find(files: Mapping[Path, _File], file: Path, key: str) -> StoredTensor:
    if key not in files[file].tensors:
        raise ExportError(f"{file}: no tensor {key}")
    return files[file].tensors[key]


def _name_type(tensor: StoredTensor) -> str:
    return TYPES[tensor.dtype].name if tensor.dtype in TYPES else tensor.dtype


def _locate(part: TableTensor, width: int, files: Mapping[Path, _File]) -> tuple[str, TablePart]:
    """Return the type and the place of a part of a table with rows of `width` numbers."""
    tensor = _find(files, part.file, part.key)
    dtype = _name_type(tensor)
    if dtype not in (*STORED_TYPES, FLOAT8):
        raise ExportError(f"{part.file}: tensor {part.key} is {dtype}, expected {', '.join((*STORED_TYPES, FLOAT8))}")
    if len(tensor.shape) != 2 or tensor.shape[1] != width:
        raise ExportError(f"{part.file}: tensor {part.key} has shape {list(tensor.shape)}, expected rows of {width}")
    rows = tensor.shape[0]
    if not rows:
        raise ExportError(f"{part.file}: tensor {part.key} has no rows, expected at least one in each part of a table")
    if (part.scales is not None) != (dtype == FLOAT8):
        got = f"{dtype} with scales" if part.scales else f"{dtype} without scales"
        raise ExportError(f"{part.file}: tensor {part.key} is {got}, expected scales for {FLOAT8} alone")
    scales = None if part.scales is None else _locate_scales(*part.scales, rows, width, files)
    return dtype, TablePart(file=files[part.file].path, begin=tensor.begin, rows=rows, scales=scales)


def _locate_scales(file: Path, key: str, rows: int, width: int, files: Mapping[Path, _File]) -> TableScales:
    """Return the place of the scales of a part: one of the tensor, one of each row, or one of each block."""
    tensor = _find(files, file, key)
    blocks = (-(-rows // BLOCK), -(-width // BLOCK))
    units = {(): (rows, width), (1,): (rows, width), (1, 1): (rows, width)}
    units |= {blocks: (BLOCK, BLOCK), (rows,): (1, width), (rows, 1): (1, width)}
    dtype = _name_type(tensor)
    if tensor.shape not in units or dtype not in STORED_TYPES:
        raise ExportError(
            f"{file}: tensor {key} is {dtype} {list(tensor.shape)}, expected float32, float16 or bfloat16 with a scale "
            f"for the tensor, for each of {rows} rows, or for each block of {BLOCK} x {BLOCK}, {list(blocks)}"
        )
    block_rows, block_columns = units[tensor.shape]
    return TableScales.model_validate(
        {
            "file": files[file].path,
            "begin": tensor.begin,
            "dtype": dtype,
            "block_rows": block_rows,
            "block_columns": block_columns,
        }
    )


def _compare_rows(tensor: TableTensor, part: TablePart, row_bytes: int) -> None:
    """Compare the first, the middle and the last row of a part with those of the safetensors library."""
    with safe_open(tensor.file, framework="numpy") as weights:
        rows = weights.get_slice(tensor.key)
        for row in sorted({0, part.rows // 2, part.rows - 1}):
            expected = rows[row : row + 1].tobytes()
            found = np.fromfile(part.file, np.uint8, row_bytes, offset=part.begin + row * row_bytes).tobytes()
            if found != expected:
                raise ExportError(f"{part.file}: row {row} of {tensor.key} is not at byte {part.begin} of its table")


def _published_hash(file: Path) -> str | None:
    """Return the SHA-256 that a hub published: its cache names the blob of a large file by it. None for other files."""
    return file.name if file.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", file.name) else None
