"""N-gram embeddings from mapped tables: row ids by NumPy or a graph, rows gathered in their stored type.

`_stored_rows.c` copies the bytes of rows, or NumPy if that was not built.

Letters: B batch, L length, T tokens, N layers or tables, H heads of a layer, which are its rows of a token, S scales of
a row.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest, TablePart, TableScales
from preblock.service.artifacts.names import DATA, MANIFEST, NGRAM_ROW_IDS, NGRAM_SCALES, NGRAMS, STORED_NGRAMS
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import FileSignature
from preblock.service.core.types import TENSOR_DTYPES, Int64
from preblock.service.runtime.fused_embedding import BUILT, guard_mapped_files
from preblock.service.runtime.runner import Feeds, Float32, Runner
from preblock.service.runtime.table_memory import TableMemory

if BUILT:
    from preblock.service.runtime._kernels import gather_rows, open_table

Bytes = NDArray[np.uint8]
Parts = Sequence[memoryview]
"""The rows of a table, in one buffer or in several."""


class Gather(Protocol):
    """Copies rows of tables with one row size."""

    def __init__(self, tables: Sequence[Parts], row_bytes: int) -> None:
        """Open the tables."""

    def run(self, ids: Int64, out: Bytes) -> None:
        """Write the rows of `ids`, (T, N, H), into `out`, (T, N, H, row bytes); both are contiguous.

        Raises:
            IndexError: an id has no row.
            BufferError: a file of the tables has become shorter.

        """


class KernelGather:
    """Gathers by `_stored_rows.c`; see `Gather`."""

    def __init__(self, tables: Sequence[Parts], row_bytes: int) -> None:
        guard_mapped_files()
        self._tables = tuple(open_table(tuple(parts), row_bytes) for parts in tables)

    def run(self, ids: Int64, out: Bytes) -> None:
        """Write the rows of `ids` into `out`."""
        gather_rows(ids, self._tables, out, ids.shape[2])


class NumpyGather:
    """Gathers by NumPy; see `Gather`. A file that becomes shorter is fatal."""

    def __init__(self, tables: Sequence[Parts], row_bytes: int) -> None:
        self._tables: list[list[Bytes]] = [
            [np.frombuffer(part, np.uint8).reshape(-1, row_bytes) for part in parts] for parts in tables
        ]

    def run(self, ids: Int64, out: Bytes) -> None:
        """Write the rows of `ids` into `out`."""
        for layer, parts in enumerate(self._tables):
            wanted, found, first = ids[:, layer], out[:, layer], 0
            rows = sum(map(len, parts))
            outside = wanted.view(np.uint64) >= rows  # as unsigned numbers, negative ones are large
            if outside.any():
                raise IndexError(f"id: got {int(wanted[outside][0])}, expected 0 to {rows - 1}")
            for part in parts:
                here = (wanted >= first) & (wanted < first + len(part))
                found[here] = part[wanted[here] - first]
                first += len(part)


GATHER: type[Gather] = KernelGather if BUILT else NumpyGather


class StoredRows:
    """Rows of the tables of all layers, of one type and width.

    Args:
        tables: the rows of each layer.
        dtype: of the stored numbers.
        width: numbers in a row.
        memory: counts the rows, and has the budget of resident pages.

    """

    def __init__(self, tables: Sequence[Parts], dtype: np.dtype[Any], width: int, memory: TableMemory) -> None:
        self.dtype, self.width = dtype, width
        self._row_bytes = width * dtype.itemsize
        self._gather, self._memory = GATHER(tables, self._row_bytes), memory

    def gather(self, ids: Int64) -> NDArray[Any]:
        """Return the stored rows of `ids`, (T, N, H), as an array (T, N, H * width) of the stored type.

        Raises:
            IndexError: an id has no row.
            BufferError: a file of the tables has become shorter.

        """
        # Repeated rows are copied again: np.unique alone takes longer than the whole gather, however many are repeated.
        tokens, layers, heads = ids.shape
        rows: Bytes = np.empty((*ids.shape, self._row_bytes), np.uint8)
        most = tokens if self._memory.max_rows is None else max(1, self._memory.max_rows // (layers * heads))
        for begin in range(0, tokens, max(1, most)):
            part = ids[begin : begin + most]
            self._memory.reserve(part.size, self._row_bytes)
            self._gather.run(part, rows[begin : begin + most])
        return rows.view(self.dtype).reshape(tokens, layers, heads * self.width)


MapFile = Callable[[str], memoryview]


class NgramRows:
    """Computes the outputs of n-gram tables, each (B, L, values of a token).

    Args:
        ids: computes the row ids.
        rows: the stored rows.
        scales: the scales of the rows; None for a type without scales.

    """

    def __init__(self, ids: Runner, rows: StoredRows, scales: "RowScales | None") -> None:
        self._ids, self._rows, self._scales = ids, rows, scales
        self._closed = False

    def close(self) -> None:
        """Refuse further calls, because a file of the tables has changed."""
        self._closed = True

    def run(self, feeds: Feeds, outputs: Sequence[str], /) -> dict[str, NDArray[Any]]:
        """Return `outputs` by name.

        Raises:
            ArtifactError: a file of the tables has changed, or an id has no row.

        """
        if self._closed:
            message = f"a table of {NGRAMS} has changed since it was opened; the log names the file"
            raise ArtifactError(NGRAMS, "a changed file", "the file as it was opened", message=message)
        ids: Int64 = self._ids.run(feeds, [NGRAM_ROW_IDS])[NGRAM_ROW_IDS].view(np.int64)
        batch, length, layers, heads = ids.shape
        tokens = ids.reshape(-1, layers, heads)
        found: dict[str, NDArray[Any]] = {}
        try:
            if NGRAM_ROW_IDS in outputs:
                found[NGRAM_ROW_IDS] = ids
            if NGRAM_SCALES in outputs and self._scales is not None:
                found[NGRAM_SCALES] = self._scales.gather(tokens)
            if NGRAMS in outputs or STORED_NGRAMS in outputs:
                found[STORED_NGRAMS] = self._rows.gather(tokens)
            if NGRAMS in outputs:
                found[NGRAMS] = self._widen(found[STORED_NGRAMS], tokens)
        except (BufferError, IndexError) as error:
            message = f"a table of {NGRAMS} is broken: {error}"
            raise ArtifactError(NGRAMS, str(error), "all rows of the tables", message=message) from error
        return {name: found[name].reshape(batch, length, -1) for name in outputs}

    def _widen(self, stored: NDArray[Any], ids: Int64) -> Float32:
        """Return stored rows (T, N, H * width) as float32: exact, and then times their scales."""
        values: Float32 = stored.astype(np.float32, copy=False)
        if self._scales is not None:
            columns = values.reshape(*ids.shape, self._rows.width)
            columns *= self._scales.spread(self._scales.gather(ids).reshape(*ids.shape, -1))
        return values


class RowScales:
    """The scales of rows, each for a block of rows and columns.

    Args:
        parts: the parts of the table of each layer.
        width: numbers in a row of the tables.
        map_file: maps a file of the manifest.
        memory: as in `StoredRows`.

    """

    def __init__(
        self, parts: Sequence[Sequence[TablePart]], width: int, map_file: MapFile, memory: TableMemory
    ) -> None:
        first = _scales_of(parts[0][0])
        self._columns, self._width = first.block_columns, width
        self.of_row = -(-width // self._columns)
        dtype = TENSOR_DTYPES[first.dtype]
        size = self.of_row * dtype.itemsize
        self._starts: list[tuple[Int64, Int64, Int64]] = []
        tables = []
        for layer in parts:
            blocks = np.array([_scales_of(part).block_rows for part in layer])
            rows = np.array([part.rows for part in layer])
            counts = -(-rows // blocks)
            self._starts.append((np.cumsum(rows) - rows, np.cumsum(counts) - counts, blocks))
            tables.append(
                [
                    map_file(_scales_of(part).file)[_scales_of(part).begin :][: int(count) * size]
                    for part, count in zip(layer, counts, strict=True)
                ]
            )
        self._rows = StoredRows(tables, dtype, self.of_row, memory)

    def gather(self, ids: Int64) -> Float32:
        """Return the scales of rows (T, N, H) as float32, (T, N, H * S)."""
        blocks = np.empty_like(ids)
        for layer, (starts, first, rows) in enumerate(self._starts):
            part = np.searchsorted(starts, ids[:, layer], "right") - 1
            blocks[:, layer] = first[part] + (ids[:, layer] - starts[part]) // rows[part]
        return self._rows.gather(blocks).astype(np.float32)

    def spread(self, scales: Float32) -> Float32:
        """Return the scale of each number of a row, (…, width), from those of a row, (…, S)."""
        return scales if self.of_row == 1 else scales.repeat(self._columns, -1)[..., : self._width]


def open_ngram_rows(
    folder: Path, manifest: Manifest, ids: Runner, memory: TableMemory, references: Mapping[str, FileSignature]
) -> NgramRows:
    """Map the n-gram tables of an artifact, whose places were checked.

    Args:
        folder: the artifact.
        manifest: with `ngram_tables`.
        ids: computes the row ids.
        memory: of all tables of the process.
        references: signatures of the checked files outside the artifact, by path.

    Raises:
        ArtifactError: the tables of several layers differ in type, width or scales, or a file cannot be mapped.

    """
    tables = manifest.ngram_tables
    kinds = {
        (table.dtype, table.width, *((part.scales.dtype, part.scales.block_columns) if part.scales else ()))
        for table in tables
        for part in table.parts
    }
    if len(kinds) != 1:
        got = "; ".join(sorted(" ".join(map(str, kind)) for kind in kinds))
        raise ArtifactError(f"{MANIFEST} ngram_tables", got, "one type, width and kind of scales for all parts")
    mapped: dict[str, memoryview] = {}

    def map_file(file: str) -> memoryview:
        if file not in mapped:
            mapped[file] = memory.map(folder / DATA if file == DATA else Path(file), references.get(file))
        return mapped[file]

    dtype, width = TENSOR_DTYPES[tables[0].dtype], tables[0].width
    size = width * dtype.itemsize
    parts = [table.parts for table in tables]
    stored = [[map_file(part.file)[part.begin :][: part.rows * size] for part in layer] for layer in parts]
    scaled = parts[0][0].scales is not None
    scales = RowScales(parts, width, map_file, memory) if scaled else None
    return NgramRows(ids, StoredRows(stored, dtype, width, memory), scales)


def _scales_of(part: TablePart) -> TableScales:
    assert part.scales is not None
    return part.scales
