"""Tables that an artifact stores in another type than float32: rounded, written, compared, and looked up.

What is computed is float32 always. A table is never in memory as a whole: it is rounded part by part on its way from
one file into another, and widened row by row where it is looked up.

Letters: B batch, L length, V rows and D width of a table.
"""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from preblock.export.errors import ExportError
from preblock.export.external_data import map_weights
from preblock.export.graph import MODULE, save_graph
from preblock.export.progress import Progress, Report
from preblock.export.table_formats import CODES, ENDINGS, FORMATS, SCALE, WIDTH, Format, Parts
from preblock.models.frontend import FrontEnd, FrontEndConfig
from preblock.models.modules.hybrid import HybridPositions
from preblock.models.modules.positions import LearnedPositions
from preblock.models.modules.tokens import TokenTable
from preblock.service.artifacts.manifest import DATA, GRAPH, TOKEN_GRAPHS, StoredTable

PART = 2**20
"""Numbers of a table that are rounded at a time: the working memory stays small, however large a table is."""
FLUSH = 2**26
"""Bytes after which the disk takes what was written."""
ALIGNMENT = 64
"""Of tensors in the data file, in bytes."""
TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.int64: onnx.TensorProto.INT64,
}
DTYPES: dict[int, torch.dtype] = {data_type: dtype for dtype, data_type in TYPES.items()}
TABLES = TokenTable | LearnedPositions | HybridPositions
"""What ids, indices and positions look up, and what is trained. Norms, projections and sinusoids stay in float32."""


class NarrowTable(nn.Module):
    """A table as it is stored, in place of a `TokenTable`: rows are widened when they are looked up.

    Args:
        format_: that it is stored in.
        parts: of all its rows; they may be mapped from a file.

    """

    def __init__(self, format_: Format, parts: Parts) -> None:
        super().__init__()
        self._format = format_
        self._parts = parts

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D), float32, of int64 `input_ids` (B, L)."""
        rows = self._format.widen(_take(self._parts, input_ids.reshape(-1)))
        return rows.reshape(*input_ids.shape, rows.shape[1])


def sketch(frontend: FrontEnd) -> FrontEnd:
    """Return `frontend` with tables of two rows, no two the same: for a graph that other tables will be put into."""
    drawn = FrontEnd.from_tensors(frontend.config, frontend.state_dict()).eval()
    for number, (name, table) in enumerate(_tables(frontend).items()):
        module = drawn.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(torch.full((2, table.shape[1]), number + 1.0))
        if isinstance(module, TokenTable):
            module.padding_idx = None  # that has no row here; only training asks for it
    return drawn


def write_tables(frontend: FrontEnd, format_: Format, folder: Path, report: Report = lambda _: None) -> None:
    """Put the tables of `frontend` into the artifact in `folder`, in `format_`, in place of those of its graphs.

    `report` is told how far it is, if it takes long.
    """
    tables = _tables(frontend)
    progress = _progress(report, f"rounding the tables to {format_.dtype}", tables, 1 + (format_.scale == "tensor"))
    models = {
        graph: onnx.load(folder / graph, load_external_data=False)
        for graph in TOKEN_GRAPHS
        if (folder / graph).is_file()
    }
    places: dict[str, tuple[int, int]] = {}
    layouts: dict[str, Parts] = {}
    draft = folder / f"{DATA}.new"
    with (folder / DATA).open("rb") as before, draft.open("xb") as data:
        for name, table in tables.items():
            layout = _layout(format_, table, progress)
            layouts[MODULE + name] = layout
            places |= _write_table(MODULE + name, format_, table, layout, data, progress)
        for model in models.values():
            _gather_narrow(model.graph, format_, layouts)
            for tensor in model.graph.initializer:
                if tensor.data_location != onnx.TensorProto.EXTERNAL:
                    continue
                if tensor.name not in places:
                    places[tensor.name] = _copy(tensor, before, data)
                _place(tensor, *places[tensor.name])
    draft.replace(folder / DATA)
    for graph, model in models.items():
        save_graph(model, folder / graph)


def compare_tables(
    frontend: FrontEnd, format_: Format, folder: Path, report: Report = lambda _: None
) -> dict[str, StoredTable]:
    """Return how the tables that the artifact in `folder` stores differ from those of `frontend`, by name.

    `report` is told how far it is, if it takes long.

    Raises:
        ExportError: a value is not finite, or not in that type; or another is stored than it is rounded to.

    """
    tensors, tables = _initializers(folder), _tables(frontend)
    progress = _progress(report, "comparing the tables", tables)
    return {
        name: _compare_table(
            name,
            format_,
            table,
            {ending: tensors[MODULE + name + ending] for ending in ENDINGS if MODULE + name + ending in tensors},
            folder,
            progress,
        )
        for name, table in tables.items()
    }


def read_format(folder: Path) -> Format | None:
    """Return how the artifact in `folder` stores its tables; None for float32."""
    tensors = _initializers(folder)
    codes, scale = (tensors.get(f"{MODULE}tokens.weight{ending}") for ending in (CODES, SCALE))
    for format_ in FORMATS:
        shared = scale is not None and not scale.dims
        if codes and codes.data_type == TYPES[format_.codes] and shared == (format_.scale == "tensor"):
            return format_
    return None


def build_narrow(config: FrontEndConfig, weights: Mapping[str, Tensor], format_: Format, folder: Path) -> FrontEnd:
    """Build a front-end around `weights`, of which those that the artifact in `folder` stores are not needed.

    Tables of tokens, segments and levels are mapped from the artifact; those of positions, which are short, are
    widened.

    Raises:
        KeyError, RuntimeError: a tensor is missing, of another shape, or not of this front-end.

    """
    with torch.device("meta"):
        tables = _tables(FrontEnd(config))
    stored = _map_tables(tables, folder)
    shapes = {
        name: (len(parts[CODES]), format_.widen(_take(parts, slice(1))).shape[1]) for name, parts in stored.items()
    }
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    frontend = FrontEnd.from_tensors(config, {**weights, **tensors}).eval()
    for name, parts in stored.items():
        module = frontend.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, TokenTable):
            frontend.set_submodule(name.removesuffix(".weight"), NarrowTable(format_, parts))
        else:
            module.weight = nn.Parameter(format_.widen(parts))
    return frontend


def _tables(frontend: FrontEnd) -> dict[str, Tensor]:
    """Return the tables of `frontend`, by their names in `state_dict()`."""
    weights = frontend.state_dict()
    names = [f"{name}.weight" for name, module in frontend.named_modules() if isinstance(module, TABLES)]
    return {name: weights[name] for name in names}


def _parts(table: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of `table`, some at a time, in float32, after the number of the first of them."""
    rows = max(1, PART // table.shape[1])
    for begin in range(0, len(table), rows):
        yield begin, table[begin : begin + rows].to(torch.float32)


def _progress(report: Report, step: str, tables: Mapping[str, Tensor], times: int = 1) -> Progress:
    return Progress(report, step, times * sum(4 * table.numel() for table in tables.values()))


def _take(parts: Parts, rows: Tensor | slice) -> Parts:
    """Return `parts` with these rows only of what is stored for each row."""
    return {ending: part[rows] if part.ndim > 1 else part for ending, part in parts.items()}


def _layout(format_: Format, table: Tensor, progress: Progress) -> Parts:
    """Return the parts that `table` will have: those that are stored once, and of the others type and shape alone."""

    def read() -> Iterator[Tensor]:
        for _, rows in _parts(table):
            yield rows
            progress.add(rows.nbytes)

    whole = format_.whole(read())
    first = format_.narrow(table[:1].to(torch.float32), whole)
    of_rows = {
        ending: torch.empty((len(table), *part.shape[1:]), dtype=part.dtype, device="meta")
        for ending, part in first.items()
    }
    return of_rows | whole


def _write_table(
    name: str, format_: Format, table: Tensor, layout: Parts, data: BinaryIO, progress: Progress
) -> dict[str, tuple[int, int]]:
    """Round `table` into the data file, and return offset and length of its parts, by the names of initializers."""
    whole = {ending: part for ending, part in layout.items() if not part.is_meta}
    places, end = {}, data.seek(0, os.SEEK_END)
    for ending, part in layout.items():
        if part.is_meta:
            begin = end + -end % ALIGNMENT
            places[ending], end = (begin, part.nbytes), begin + part.nbytes
    written = 0
    for first, rows in _parts(table):
        for ending, part in format_.narrow(rows, whole).items():
            data.seek(places[ending][0] + first * part[0].nbytes)
            data.write(_bytes(part))
            written += part.nbytes
        if written >= FLUSH:  # else the disk takes all at once at the end, when nothing tells how far it is
            data.flush()
            os.fdatasync(data.fileno())
            written = 0
        progress.add(rows.nbytes)
    return {name + ending: place for ending, place in places.items()}


def _compare_table(
    name: str,
    format_: Format,
    table: Tensor,
    tensors: Mapping[str, onnx.TensorProto],
    folder: Path,
    progress: Progress,
) -> StoredTable:
    """Return how the parts that lie in `tensors` differ from `table`, (V, D)."""
    whole = {
        ending: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        for ending, tensor in tensors.items()
        if len(tensor.dims) < 2
    }
    largest, total, cosine = 0.0, 0.0, 1.0
    for first, rows in _parts(table):
        parts = {
            ending: _read_rows(tensor, folder, first, len(rows))
            for ending, tensor in tensors.items()
            if ending not in whole
        }
        worth = format_.widen({**whole, **parts})
        exact, stored = rows.double(), worth.double()
        error = (stored - exact).abs_()
        worst = error.amax(1)
        if not worst.isfinite().all():
            values = rows[~error.isfinite()]
            value = float(values[values.abs().argmax()])
            raise ExportError(f"--dtype: got {format_.dtype}, allowed a type that holds {value:g}, a value of {name}")
        again = format_.narrow(rows, whole)
        if not all(torch.equal(again[ending], part) for ending, part in parts.items()):
            raise ExportError(f"{folder / DATA}: holds something else than {name} rounded to {format_.dtype}")
        largest, total = max(largest, float(worst.max())), total + float(error.sum())
        lengths = torch.linalg.vecdot(exact, exact).sqrt() * torch.linalg.vecdot(stored, stored).sqrt()
        cosines = torch.linalg.vecdot(exact, stored) / lengths.clamp(min=torch.finfo(torch.float64).tiny)
        cosine = min(cosine, float(cosines.where(worst > 0, 1.0).min()))
        progress.add(rows.nbytes)
    taken = sum(math.prod(tensor.dims) * DTYPES[tensor.data_type].itemsize for tensor in tensors.values())
    height, width = table.shape
    return StoredTable(
        rows=height,
        width=width,
        max_abs=largest,
        mean_abs=total / table.numel(),
        min_cosine=cosine,
        bytes=taken,
        saved=4 * table.numel() - taken,
    )


def _gather_narrow(graph: onnx.GraphProto, format_: Format, layouts: Mapping[str, Parts]) -> None:
    """Let `graph` gather from the tables as they are stored, and widen what it gathered."""
    before = onnx.GraphProto()
    before.CopyFrom(graph)
    del graph.node[:], graph.initializer[:]
    for node in before.node:
        layout = layouts.get(node.input[0]) if node.op_type == "Gather" else None
        graph.node.extend([node] if layout is None else _widening(format_, layout, node))
    for tensor in before.initializer:
        layout = layouts.get(tensor.name)
        graph.initializer.extend(
            [tensor] if layout is None else [_tensor(tensor.name + ending, part) for ending, part in layout.items()]
        )


def _widening(format_: Format, layout: Parts, gather: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes that stand for `gather`."""
    table, index = gather.input
    names = {
        "codes": table,
        "scale": table + SCALE,
        "width": table + WIDTH,
        "index": index,
        "vectors": gather.output[0],
    }
    graph = onnx.parser.parse_graph(
        f"widen (int64[batch, length] index) => (float[batch, length, width] vectors) {{ {format_.nodes(layout)} }}"
    )
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, f"{gather.output[0]}.{name}") for name in side]
    return list(graph.node)


def _tensor(name: str, part: Tensor) -> onnx.TensorProto:
    """Return the initializer for `part`; what is stored for each row is to be placed in the data file."""
    tensor = onnx.TensorProto(name=name, data_type=TYPES[part.dtype], dims=part.shape)
    if part.is_meta:
        tensor.data_location = onnx.TensorProto.EXTERNAL
    else:
        tensor.raw_data = bytes(_bytes(part))
    return tensor


def _copy(tensor: onnx.TensorProto, before: BinaryIO, data: BinaryIO) -> tuple[int, int]:
    """Copy the content of `tensor` from one data file to the end of another, and return its offset and length there."""
    offset, length = _where(tensor)
    end = data.seek(0, os.SEEK_END)
    data.write(bytes(-end % ALIGNMENT))
    begin = data.tell()
    before.seek(offset)
    data.write(before.read(length))
    return begin, length


def _where(tensor: onnx.TensorProto) -> tuple[int, int]:
    place = {entry.key: entry.value for entry in tensor.external_data}
    return int(place["offset"]), int(place["length"])


def _place(tensor: onnx.TensorProto, offset: int, length: int) -> None:
    del tensor.external_data[:]
    for key, value in (("location", DATA), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def _initializers(folder: Path) -> dict[str, onnx.TensorProto]:
    graph = onnx.load(folder / GRAPH, load_external_data=False).graph
    return {tensor.name: tensor for tensor in graph.initializer}


def _map_tables(names: Collection[str], folder: Path) -> dict[str, Parts]:
    """Return all parts of the tables `names` of the artifact in `folder`; those of all rows are mapped, not read."""
    model = onnx.load(folder / GRAPH, load_external_data=False)
    weights, types = map_weights(model, folder), {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {
        name: {
            ending: _of_bytes(weights[stored], types[stored], weights[stored].shape)
            for ending in ENDINGS
            if (stored := MODULE + name + ending) in weights
        }
        for name in names
    }


def _read_rows(tensor: onnx.TensorProto, folder: Path, first: int, count: int) -> Tensor:
    """Return some rows of `tensor`, read and not mapped: what was read once is not needed any more."""
    offset, length = _where(tensor)
    row = length // tensor.dims[0]
    content = np.fromfile(folder / DATA, np.uint8, count * row, offset=offset + first * row)
    return _of_bytes(content, tensor.data_type, (count, *tensor.dims[1:]))


def _of_bytes(content: NDArray[Any], data_type: int, shape: Sequence[int]) -> Tensor:
    """Return `content`, an array of whatever type, as a tensor over the same bytes: numpy does not know every type."""
    return torch.from_numpy(content.reshape(-1).view(np.uint8)).view(DTYPES[data_type]).reshape(tuple(shape))


def _bytes(part: Tensor) -> memoryview:
    return part.reshape(-1).view(torch.uint8).numpy().data
