"""Recognition of the graphs supported by the fused kernel of the service."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto
from onnx.external_data_helper import set_external_data
from onnx.helper import make_graph, make_node, make_tensor, make_tensor_value_info
from torch import Tensor, nn

from preblock.export import export_module
from preblock.export.own_modules.kernel_tables import find_tokens
from preblock.service.artifacts.manifest import KernelTokens, Manifest

Places = make_node("Gather", ["places", "offset"], ["positions"])
Gather, Mul, Add = (
    make_node("Gather", ["table", "input_ids"], ["rows"]),
    make_node("Mul", ["rows", "factor"], ["scaled"]),
    make_node("Add", ["scaled", "positions"], ["embeddings"]),
)
LONG, WIDTH = 512, 6
"""Sizes of a custom module; so many rows are in the data file."""
PLAIN = make_node("Add", ["rows", "positions"], ["embeddings"])


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([Gather, PLAIN], 1.0),
        ([Gather, Mul, Add], 0.5),
        ([Gather, make_node("Mul", ["factor", "rows"], ["scaled"]), Add], 0.5),
        ([make_node("Gather", ["table", "input_ids"], ["rows"], axis=1), PLAIN], None),
        ([make_node("Gather", ["table", "token_type_ids"], ["rows"]), PLAIN], None),
        ([make_node("Gather", ["inside", "input_ids"], ["rows"]), PLAIN], None),
        ([make_node("Gather", ["half", "input_ids"], ["rows"]), PLAIN], None),
        ([make_node("Gather", ["unaligned", "input_ids"], ["rows"]), PLAIN], None),
        ([Gather, make_node("Sub", ["rows", "positions"], ["embeddings"])], None),
        ([Gather, make_node("Add", ["rows", "rows"], ["embeddings"])], None),
        ([Gather, make_node("Add", ["rows", "positions"], ["summand"])], None),
        ([Gather, make_node("Mul", ["rows", "several"], ["scaled"]), Add], None),
        ([Gather, make_node("Mul", ["rows", "double"], ["scaled"]), Add], None),
        ([Gather, make_node("Mul", ["factor", "factor"], ["scaled"]), Add], None),
        ([Gather, make_node("Mul", ["rows", "factor"], ["scaled"], domain="other"), Add], None),
    ],
)
def test_kernel_recognizes_only_scaled_table_lookups(nodes: list[onnx.NodeProto], found: float | None) -> None:
    tensors = [
        make_tensor("factor", TensorProto.FLOAT, [], [0.5]),
        make_tensor("double", TensorProto.DOUBLE, [], [0.5]),
        make_tensor("several", TensorProto.FLOAT, [4], [0.5] * 4),
        make_tensor("inside", TensorProto.FLOAT, [9, 4], [0.5] * 36),
    ]
    for name, kind, offset in (
        ("table", TensorProto.FLOAT, 64),
        ("unaligned", TensorProto.FLOAT, 66),
        ("half", TensorProto.FLOAT16, 64),
    ):
        tensor = make_tensor(name, kind, [9, 4], b"\0" * 144 if kind == TensorProto.FLOAT else b"\0" * 72, raw=True)
        set_external_data(tensor, "model.onnx.data", offset, len(tensor.raw_data))
        tensor.ClearField("raw_data")
        tensors.append(tensor)
    inputs = [make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])]
    outputs = [make_tensor_value_info("embeddings", TensorProto.FLOAT, ["batch", "length", 4])]
    graph = make_graph([Places, *nodes], "sums", inputs, outputs, tensors)
    declared = None if found is None else KernelTokens(begin=64, rows=9, width=4, scale=found)
    assert find_tokens(graph, Places) == declared


class Placed(nn.Module):
    """The sum of tokens and of positions by `row`, a rule from position indices to rows."""

    def __init__(self, row: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tokens, self.places = nn.Embedding(LONG, WIDTH), nn.Embedding(LONG, WIDTH)
        self.row = row

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        rows = self.row(torch.arange(input_ids.shape[1]) + offset.unsqueeze(1), offset.unsqueeze(1))
        vectors: Tensor = self.tokens(input_ids) + self.places(rows)
        return vectors


@pytest.mark.parametrize(
    ("row", "max_len", "first"),
    [
        (lambda index, _: torch.arange(LONG)[index], LONG, 0),
        (lambda index, _: index + 2, 40, 2),
        (lambda index, _: index % 16, 24, None),
        (lambda index, _: torch.where(index > 2, index // 4, index), LONG, None),
        (lambda index, _: torch.where(index > LONG - 3, 2 * LONG - 3 - index, index), LONG, None),
        (lambda index, offset: index + (offset > 0) * (index > offset), LONG - 1, None),
    ],
    ids=["buffer", "shifted", "repeated", "buckets", "swapped end", "gap after offset"],
)
def test_rows_of_all_positions_decide_about_kernel(
    tmp_path: Path, row: Callable[[Tensor, Tensor], Tensor], max_len: int, first: int | None
) -> None:
    exported = export_module(Placed(row), "placed", tmp_path, vocab_size=LONG, max_len=max_len, exact=True)
    assert isinstance(exported.manifest, Manifest)
    kernel = exported.manifest.kernel
    assert (kernel and kernel.positions.first) == first
