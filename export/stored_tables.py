"""The tables of an artifact in their stored types: reading, mapping, and widening at lookup.

Letters: B batch, L length, V rows and D width of a table.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from preblock.export.external_data import map_weights
from preblock.export.graph import MODULE
from preblock.export.progress import Report, StepProgress
from preblock.export.table_formats import CODES, ENDINGS, FORMATS, SCALE, Parts, TableFormat
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.positions import LearnedPositionalEncoding
from preblock.models.modules.tokens import TokenEmbedding
from preblock.service.artifacts.manifest import GRAPH

TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.int64: onnx.TensorProto.INT64,
}
DTYPES: dict[int, torch.dtype] = {data_type: dtype for dtype, data_type in TYPES.items()}
TABLES = TokenEmbedding | LearnedPositionalEncoding | HybridPositionalEncoding
"""Modules with a trained table, stored in the chosen type. Norms, projections and sinusoids stay in float32."""
CHUNK_VALUES = 2**20
"""Values of a table processed at once, to bound the working memory."""


class QuantizedTable(nn.Module):
    """A stored table in place of a `TokenEmbedding`; rows are widened at lookup.

    Args:
        format_: stored type.
        parts: parts of the table; they may be mapped from a file.

    """

    def __init__(self, format_: TableFormat, parts: Parts) -> None:
        super().__init__()
        self._format = format_
        self._parts = parts

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D), float32, of int64 `input_ids` (B, L)."""
        rows = self._format.widen(take_rows(self._parts, input_ids.reshape(-1)))
        return rows.reshape(*input_ids.shape, rows.shape[1])


def read_format(folder: Path) -> TableFormat | None:
    """Return the format of the tables in `folder`; None for float32."""
    tensors = initializers_of(folder)
    codes, scale = (tensors.get(f"{MODULE}tokens.weight{ending}") for ending in (CODES, SCALE))
    for format_ in FORMATS:
        shared = scale is not None and not scale.dims
        if codes and codes.data_type == TYPES[format_.codes] and shared == (format_.scale == "tensor"):
            return format_
    return None


def build_quantized(
    config: FrontEndConfig, weights: Mapping[str, Tensor], format_: TableFormat, folder: Path
) -> FrontEnd:
    """Build a front-end around `weights` and the stored tables in `folder`.

    Tables of tokens, segments and levels are mapped from the artifact. Tables of positions are short, and widened.

    Raises:
        KeyError, RuntimeError: a tensor is missing, of another shape, or not of this front-end.

    """
    with torch.device("meta"):
        tables = tables_of(FrontEnd(config))
    stored = _map_tables(tables, folder)
    shapes = {
        name: (len(parts[CODES]), format_.widen(take_rows(parts, slice(1))).shape[1]) for name, parts in stored.items()
    }
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    frontend = FrontEnd.from_tensors(config, {**weights, **tensors}).eval()
    for name, parts in stored.items():
        module = frontend.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, TokenEmbedding):
            frontend.set_submodule(name.removesuffix(".weight"), QuantizedTable(format_, parts))
        else:
            module.weight = nn.Parameter(format_.widen(parts))
    return frontend


def tables_of(frontend: FrontEnd) -> dict[str, Tensor]:
    """Return the tables of `frontend`, by their names in `state_dict()`."""
    weights = frontend.state_dict()
    names = [f"{name}.weight" for name, module in frontend.named_modules() if isinstance(module, TABLES)]
    return {name: weights[name] for name in names}


def row_parts(table: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of `table` in float32 chunks, each with the index of its first row."""
    rows = max(1, CHUNK_VALUES // table.shape[1])
    for begin in range(0, len(table), rows):
        yield begin, table[begin : begin + rows].to(torch.float32)


def table_progress(report: Report, step: str, tables: Mapping[str, Tensor], times: int = 1) -> StepProgress:
    """Return the progress of a step that reads `tables` as often as `times`."""
    return StepProgress(report, step, times * sum(4 * table.numel() for table in tables.values()))


def take_rows(parts: Parts, rows: Tensor | slice) -> Parts:
    """Return `parts`, with a selection of rows from the parts stored for each row."""
    return {ending: part[rows] if part.ndim > 1 else part for ending, part in parts.items()}


def initializers_of(folder: Path) -> dict[str, onnx.TensorProto]:
    """Return the initializers of the main graph in `folder`, by name."""
    graph = onnx.load(folder / GRAPH, load_external_data=False).graph
    return {tensor.name: tensor for tensor in graph.initializer}


def _map_tables(names: Collection[str], folder: Path) -> dict[str, Parts]:
    """Return the parts of the tables `names` in `folder`; parts in the data file are mapped, not read."""
    model = onnx.load(folder / GRAPH, load_external_data=False)
    weights, types = map_weights(model, folder), {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {
        name: {
            ending: of_bytes(weights[stored], types[stored], weights[stored].shape)
            for ending in ENDINGS
            if (stored := MODULE + name + ending) in weights
        }
        for name in names
    }


def of_bytes(content: NDArray[Any], data_type: int, shape: Sequence[int]) -> Tensor:
    """Return the bytes of `content` as a tensor, without a copy. numpy lacks some of the types."""
    return torch.from_numpy(content.reshape(-1).view(np.uint8)).view(DTYPES[data_type]).reshape(tuple(shape))
