"""The tables of an artifact in their stored types, mapped from its data file and widened at lookup.

Letters: B batch, L length, V rows and D width of a table.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from preblock.export.external_data import map_weights
from preblock.export.graph import MODULE
from preblock.export.table_formats import CODES, ENDINGS, FORMATS, SCALE, TableFormat
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.positions import LearnedPositionalEncoding
from preblock.models.modules.tokens import TokenEmbedding
from preblock.service.artifacts.names import GRAPH

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

T = TypeVar("T")
TorchParts = dict[str, Tensor]


class QuantizedTable(nn.Module):
    """A stored table in place of a `TokenEmbedding`; rows are widened at lookup.

    Args:
        format_: stored type.
        parts: parts of the table; they may be mapped from a file.

    """

    def __init__(self, format_: TableFormat, parts: TorchParts) -> None:
        super().__init__()
        self._format = format_
        self._parts = parts

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D), float32, of int64 `input_ids` (B, L)."""
        rows = _widen(self._format, _take_rows(self._parts, input_ids.reshape(-1)))
        return rows.reshape(*input_ids.shape, rows.shape[1])


def read_format(folder: Path) -> TableFormat | None:
    """Return the format of the tables in `folder`; None for float32."""
    stored = parts_of("tokens.weight", read_tensors(folder))
    codes, scale = stored.get(CODES), stored.get(SCALE)
    for format_ in FORMATS:
        shared = scale is not None and not scale.dims
        if (
            codes
            and codes.data_type == onnx.helper.np_dtype_to_tensor_dtype(format_.codes)
            and shared == (format_.scale == "tensor")
        ):
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
    tensors, mapped = read_tensors(folder), map_weights(folder)
    with torch.device("meta"):
        names = tables_of(FrontEnd(config))
    stored: dict[str, TorchParts] = {}
    shapes: dict[str, Tensor] = {}
    for name in names:
        parts = {
            ending: of_bytes(mapped[tensor.name], tensor.data_type, tensor.dims)
            for ending, tensor in parts_of(name, tensors).items()
        }
        width = _widen(format_, _take_rows(parts, slice(1))).shape[1]
        stored[name], shapes[name] = parts, torch.empty(len(parts[CODES]), width, device="meta")
    frontend = FrontEnd.from_tensors(config, {**weights, **shapes}).eval()
    for name, parts in stored.items():
        module = frontend.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, TokenEmbedding):
            frontend.set_submodule(name.removesuffix(".weight"), QuantizedTable(format_, parts))
        else:
            module.weight = nn.Parameter(_widen(format_, parts))
    return frontend


def tables_of(frontend: FrontEnd) -> dict[str, Tensor]:
    """Return the tables of `frontend`, by their names in `state_dict()`."""
    weights = frontend.state_dict()
    names = [f"{name}.weight" for name, module in frontend.named_modules() if isinstance(module, TABLES)]
    return {name: weights[name] for name in names}


def read_tensors(folder: Path) -> dict[str, onnx.TensorProto]:
    """Return the initializers of the main graph in `folder`, by name, without the data file."""
    graph = onnx.load(folder / GRAPH, load_external_data=False).graph
    return {tensor.name: tensor for tensor in graph.initializer}


def parts_of(table: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the parts of the table named `table` among `tensors`, by the suffixes of their names."""
    return {ending: tensors[MODULE + table + ending] for ending in ENDINGS if MODULE + table + ending in tensors}


def of_bytes(content: NDArray[Any], data_type: int, shape: Sequence[int]) -> Tensor:
    """Return the bytes of `content` as a tensor, without a copy. numpy lacks some of the types."""
    return torch.from_numpy(content.reshape(-1).view(np.uint8)).view(DTYPES[data_type]).reshape(tuple(shape))


def _widen(format_: TableFormat, parts: TorchParts) -> Tensor:
    arrays = {
        ending: part.view(torch.int16).numpy().view(format_.codes) if part.dtype == torch.bfloat16 else part.numpy()
        for ending, part in parts.items()
    }
    return torch.from_numpy(format_.widen(arrays))


def _take_rows(parts: TorchParts, rows: Tensor | slice) -> TorchParts:
    """Return `parts`, with a selection of rows from the parts stored for each row."""
    return {ending: part[rows] if part.ndim > 1 else part for ending, part in parts.items()}
