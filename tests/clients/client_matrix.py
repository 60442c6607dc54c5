"""Every graph of a folder, held against the ONNX standard: onnx's checker, and its own evaluator as the oracle."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from preblock.export.parity import difference
from preblock.service.artifacts.names import NGRAM_IDS_GRAPH

# Runtimes with another summation order or rounding. All others must be equal in every bit.
FREE = {"LayerNormalization", "MatMul", "Conv", "Sin", "Cos", "Tanh", "Gelu"}
ALLOWED_ULP = 8.0
SIZES = {"batch": 2, "length": 3, "height": 8, "width": 8, "positions": 1}
LENGTHS = {"query_offset": 3, "query_length": 2, "key_length": 5}


def check_standard(folder: Path, indices: Mapping[str, int] = MappingProxyType({}), **sizes: int) -> None:
    """Check every graph in `folder`, and run it in onnx's reference evaluator and in a bare onnxruntime.

    `indices` says how many values of an index are legal, otherwise two; `sizes` are those of axes not as in SIZES.
    """
    graphs = sorted(folder.glob("*.onnx"))
    assert graphs
    for graph in graphs:
        onnx.checker.check_model(graph, full_check=True)
        model = onnx.load(graph)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        assert (model.ir_version, [(entry.domain, entry.version) for entry in model.opset_import]) == (10, [("", 20)])
        exact = FREE.isdisjoint(_operators(model.graph))
        reference = ReferenceEvaluator(model)
        session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        for feeds in _feeds(session, indices, SIZES | sizes):
            for expected, found in zip(reference.run(None, feeds), session.run(None, feeds), strict=True):
                assert expected.dtype == found.dtype == (np.int64 if graph.name == NGRAM_IDS_GRAPH else np.float32), (
                    graph
                )
                if exact:
                    assert np.array_equal(expected, found), graph
                else:
                    assert difference(found, expected)[1] <= ALLOWED_ULP, graph


def _operators(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the operators of `graph`, and of the graphs in it."""
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            yield from _operators(attribute.g)


def _feeds(session: Any, indices: Mapping[str, int], sizes: Mapping[str, int]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield feeds with one offset for all rows and with one for each, and with a mask where there is one."""
    generator = np.random.default_rng(0)
    for offsets in ([2], [2, 0]):
        feeds: dict[str, NDArray[Any]] = {}
        for node in session.get_inputs():
            shape = [sizes.get(size, size) for size in node.shape]
            if node.name in LENGTHS:
                feeds[node.name] = np.array([LENGTHS[node.name]])
            elif node.name == "offset":
                feeds[node.name] = np.array(offsets)
            elif node.type == "tensor(float)":
                feeds[node.name] = generator.standard_normal(shape, np.float32)
            else:
                feeds[node.name] = generator.integers(0, indices.get(node.name, 2), shape)
        yield feeds
