"""Recognition of the graphs supported by the fused kernel of the service."""

import onnx
import pytest
from onnx import TensorProto
from onnx.external_data_helper import set_external_data
from onnx.helper import make_graph, make_node, make_tensor, make_tensor_value_info

from preblock.export.position_inputs import tokens_of
from preblock.service.artifacts.records import KernelTokens

Gather, Mul, Add = (
    make_node("Gather", ["table", "input_ids"], ["rows"]),
    make_node("Mul", ["rows", "factor"], ["scaled"]),
    make_node("Add", ["scaled", "position_embeddings"], ["embeddings"]),
)
PLAIN = make_node("Add", ["rows", "position_embeddings"], ["embeddings"])


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([Gather, PLAIN], 1.0),
        ([Gather, make_node("Add", ["position_embeddings", "rows"], ["embeddings"])], 1.0),
        ([Gather, Mul, Add], 0.5),
        ([Gather, make_node("Mul", ["factor", "rows"], ["scaled"]), Add], 0.5),
        ([make_node("Gather", ["table", "input_ids"], ["rows"], axis=0), PLAIN], 1.0),
        ([make_node("Gather", ["table", "input_ids"], ["rows"], axis=1), PLAIN], None),
        ([make_node("Gather", ["table", "token_type_ids"], ["rows"]), PLAIN], None),
        ([make_node("Gather", ["inside", "input_ids"], ["rows"]), PLAIN], None),
        ([make_node("Gather", ["half", "input_ids"], ["rows"]), PLAIN], None),
        ([make_node("Gather", ["unaligned", "input_ids"], ["rows"]), PLAIN], None),
        ([Gather, make_node("Sub", ["rows", "position_embeddings"], ["embeddings"])], None),
        ([Gather, make_node("Add", ["rows", "rows"], ["embeddings"])], None),
        ([Gather, make_node("Add", ["rows", "position_embeddings"], ["summand"])], None),
        ([Gather, make_node("Mul", ["rows", "several"], ["scaled"]), Add], None),
        ([Gather, make_node("Mul", ["rows", "double"], ["scaled"]), Add], None),
        ([Gather, make_node("Mul", ["rows", "rows"], ["scaled"]), Add], None),
        ([Gather, make_node("Mul", ["factor", "factor"], ["scaled"]), Add], None),
        ([Gather, Mul, PLAIN], None),
        ([Gather, PLAIN, make_node("Neg", ["embeddings"], ["summand"])], None),
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
    graph = make_graph(nodes, "sums", inputs, outputs, tensors)
    declared = None if found is None else KernelTokens(begin=64, rows=9, width=4, scale=found)
    assert tokens_of(graph) == declared
