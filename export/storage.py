"""Tables that an artifact stores in another type than float32: rounded, written, and read back.

What is computed is float32 always. A table is never widened as a whole: a graph gathers first.

Letters: V rows and D width of a table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import torch
from torch import Tensor

from incipit.export.errors import ExportError
from incipit.export.formats import CODES, FORMATS, SCALE, WIDTH, Format, Parts
from incipit.export.graph import MODULE, save_graph
from incipit.models.frontend import FrontEnd
from incipit.models.hybrid import HybridPositions
from incipit.models.positions import LearnedPositions
from incipit.models.tokens import TokenTable
from incipit.service.manifest import DATA, GRAPH, TOKEN_GRAPHS, StoredTable

ROWS = 4096
"""That are rounded at a time: the working memory stays small, however long a table is."""
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


@dataclass(frozen=True)
class Stored:
    """The tables of a front-end as they are stored.

    Args:
        format: of all of them.
        tables: the parts of each, by the name of its initializer.
        frontend: what they are worth: a float32 module around the widened tables.
        errors: how they differ from the tables before, by their names in `state_dict()`.

    """

    format: Format
    tables: dict[str, Parts]
    frontend: FrontEnd
    errors: dict[str, StoredTable]


def round_tables(frontend: FrontEnd, format_: Format) -> Stored:
    """Return the tables of `frontend`, which stays as it is, in `format_`.

    Tables are what ids, indices and positions look up, and what is trained; norms and projections stay as they are, and
    so do sinusoids.

    Raises:
        ExportError: a value is not finite, or not in that type.

    """
    weights = frontend.state_dict()
    tables, errors = {}, {}
    for module_name, module in frontend.named_modules():
        if isinstance(module, TokenTable | LearnedPositions | HybridPositions):
            name = f"{module_name}.weight"
            tables[MODULE + name], weights[name], errors[name] = _round_table(name, weights[name], format_)
    return Stored(format_, tables, FrontEnd.from_tensors(frontend.config, weights).eval(), errors)


def write_tables(stored: Stored, folder: Path) -> None:
    """Put the tables as they are stored into the artifact in `folder`, in place of the float32 ones of its graphs."""
    models = {
        graph: onnx.load(folder / graph, load_external_data=False)
        for graph in TOKEN_GRAPHS
        if (folder / graph).is_file()
    }
    parts = {table + ending: part for table, parts in stored.tables.items() for ending, part in parts.items()}
    places: dict[str, tuple[int, int]] = {}
    draft = folder / f"{DATA}.new"
    with (folder / DATA).open("rb") as before, draft.open("xb") as data:
        for model in models.values():
            _gather_stored(model.graph, stored)
            for tensor in model.graph.initializer:
                if tensor.data_location != onnx.TensorProto.EXTERNAL:
                    continue
                if tensor.name not in places:
                    places[tensor.name] = _append(data, _content(tensor, parts, before))
                _place(tensor, *places[tensor.name])
    draft.replace(folder / DATA)
    for graph, model in models.items():
        save_graph(model, folder / graph)


def read_format(folder: Path) -> Format | None:
    """Return how the artifact in `folder` stores its tables; None for float32."""
    tensors = _initializers(folder)
    codes, scale = (tensors.get(f"{MODULE}tokens.weight{ending}") for ending in (CODES, SCALE))
    for format_ in FORMATS:
        shared = scale is not None and not scale.dims
        if codes and codes.data_type == TYPES[format_.codes] and shared == (format_.scale == "tensor"):
            return format_
    return None


def read_tables(folder: Path) -> dict[str, Tensor]:
    """Return the tables of the artifact in `folder` that are not in float32, widened, by names of `state_dict()`."""
    format_, tensors = read_format(folder), _initializers(folder)
    if format_ is None:
        return {}
    tables = {}
    for name, tensor in tensors.items():
        if name.startswith(MODULE) and name.endswith(".weight") and tensor.data_type == TYPES[format_.codes]:
            parts = {
                ending: _values(tensors[name + ending], folder)
                for ending in (CODES, SCALE, WIDTH)
                if name + ending in tensors
            }
            tables[name.removeprefix(MODULE)] = format_.widen(parts)
    return tables


def _round_table(name: str, table: Tensor, format_: Format) -> tuple[Parts, Tensor, StoredTable]:
    """Return the parts of `table`, float32 (V, D), what they are worth, and how far that is from it."""
    whole, widened, narrowed = format_.whole(table), torch.empty_like(table), []
    largest, total, cosine = 0.0, 0.0, 1.0
    for rows, worth in zip(torch.split(table, ROWS), torch.split(widened, ROWS), strict=True):
        parts = format_.narrow(rows, whole)
        worth.copy_(format_.widen({**whole, **parts}))
        narrowed.append(parts)
        wrong = ~(rows.isfinite() & worth.isfinite())
        if wrong.any():
            values = rows[wrong]
            value = float(values[values.abs().argmax()])
            raise ExportError(f"--dtype: got {format_.dtype}, allowed a type that holds {value:g}, a value of {name}")
        exact, stored = rows.double(), worth.double()
        error = (stored - exact).abs()
        largest, total = max(largest, float(error.max())), total + float(error.sum())
        cosines = (exact * stored).sum(1) / (exact.norm(dim=1) * stored.norm(dim=1)).clamp(
            min=torch.finfo(torch.float64).tiny
        )
        cosine = min(cosine, float(cosines.where((rows != worth).any(1), 1.0).min()))
    parts = {ending: torch.cat([part[ending] for part in narrowed]) for ending in narrowed[0]} | whole
    rows_, width = table.shape
    errors = StoredTable(
        rows=rows_,
        width=width,
        max_abs=largest,
        mean_abs=total / table.numel(),
        min_cosine=cosine,
        bytes=sum(part.nbytes for part in parts.values()),
        saved=table.nbytes - sum(part.nbytes for part in parts.values()),
    )
    return parts, widened, errors


def _gather_stored(graph: onnx.GraphProto, stored: Stored) -> None:
    """Let `graph` gather from the tables as they are stored, and widen what it gathered."""
    before = onnx.GraphProto()
    before.CopyFrom(graph)
    del graph.node[:], graph.initializer[:]
    for node in before.node:
        parts = stored.tables.get(node.input[0]) if node.op_type == "Gather" else None
        graph.node.extend([node] if parts is None else _widening(stored.format, parts, node))
    for tensor in before.initializer:
        parts = stored.tables.get(tensor.name)
        graph.initializer.extend(
            [tensor] if parts is None else [_tensor(tensor.name + ending, part) for ending, part in parts.items()]
        )


def _widening(format_: Format, parts: Parts, gather: onnx.NodeProto) -> list[onnx.NodeProto]:
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
        f"widen (int64[batch, length] index) => (float[batch, length, width] vectors) {{ {format_.nodes(parts)} }}"
    )
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, f"{gather.output[0]}.{name}") for name in side]
    return list(graph.node)


def _tensor(name: str, part: Tensor) -> onnx.TensorProto:
    """Return the initializer for `part`; what is stored for each row is to be placed in the data file."""
    tensor = onnx.TensorProto(name=name, data_type=TYPES[part.dtype], dims=part.shape)
    if part.ndim < 2:
        tensor.raw_data = bytes(_bytes(part))
    else:
        tensor.data_location = onnx.TensorProto.EXTERNAL
    return tensor


def _content(tensor: onnx.TensorProto, parts: Mapping[str, Tensor], before: BinaryIO) -> memoryview:
    """Return the bytes of `tensor`: those of a part, or what the data file held before."""
    if tensor.name in parts:
        return _bytes(parts[tensor.name])
    place = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
    before.seek(place["offset"])
    return memoryview(before.read(place["length"]))


def _bytes(part: Tensor) -> memoryview:
    return part.reshape(-1).view(torch.uint8).numpy().data


def _append(data: BinaryIO, content: memoryview) -> tuple[int, int]:
    """Write `content` at the end of the data file, and return its offset and length."""
    data.write(bytes(-data.tell() % ALIGNMENT))
    offset = data.tell()
    data.write(content)
    return offset, content.nbytes


def _place(tensor: onnx.TensorProto, offset: int, length: int) -> None:
    del tensor.external_data[:]
    for key, value in (("location", DATA), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def _initializers(folder: Path) -> dict[str, onnx.TensorProto]:
    graph = onnx.load(folder / GRAPH, load_external_data=False).graph
    return {tensor.name: tensor for tensor in graph.initializer}


def _values(tensor: onnx.TensorProto, folder: Path) -> Tensor:
    """Return `tensor` of the artifact in `folder`; what numpy has no type for, and float16, in float32."""
    values = onnx.numpy_helper.to_array(tensor, str(folder))
    whole = tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT64)
    return torch.from_numpy(values.copy() if whole else values.astype(np.float32))
