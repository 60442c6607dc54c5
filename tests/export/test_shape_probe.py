"""The shape probe accepts dynamic graphs, and names frozen axes and values."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from preblock.export import export_module
from preblock.export.errors import ExportError, ParityError
from preblock.export.outputs import write_graphs
from preblock.export.shape_probe import ShapeProbe
from preblock.export.torch_reference import TorchReference
from preblock.models.embeddings import GPT2Embeddings
from preblock.models.frontend import FrontEnd
from preblock.service.runtime.session import Session

V, D, M = 13, 6, 9
GPT2 = GPT2Embeddings(V, D, M).eval()


Positions = Callable[[Tensor, Tensor, bool], Tensor]


class Broken(nn.Module):
    """Tokens + positions, a function of places (L), of offsets (1 or B, 1), and of whether the module is exported."""

    def __init__(self, positions: Positions) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.positions = nn.Embedding(V, D), nn.Embedding(M, D), positions

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        positions = self.positions(places, offset.unsqueeze(1), torch.compiler.is_compiling())
        vectors: Tensor = self.tokens(input_ids) + self.places(positions)
        return vectors


def depend_on_values(places: Tensor, offset: Tensor, _: bool) -> Tensor:
    if offset.max() > M:
        raise ValueError
    return places + offset


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (
            lambda places, offset, exported: (torch.arange(3) if exported else places) + offset,
            r"model\.onnx: axis length of \w+ is frozen at 3",
        ),
        (
            lambda places, offset, exported: places + (offset * 0 if exported else offset),
            r"model\.onnx: offset is baked in: offset 8 gives the vectors of 0",
        ),
        (
            lambda places, offset, exported: places + (offset.max(0, keepdim=True).values if exported else offset),
            r"model\.onnx: offset is the same for every row: .* at batch 3, length 1, offset \[8, 4, 0\]",
        ),
        (
            lambda places, offset, exported: (places + offset).clamp(max=M - 3 if exported else M),
            r"model\.onnx: positions are clamped: offset 8 gives the vectors of 7",
        ),
        (depend_on_values, r"the exporter of torch cannot follow the module: Could not guard on data-dependent"),
    ],
    ids=["length", "offset", "offset of all rows", "clamped", "values"],
)
def test_module_without_dynamic_graph_is_rejected(positions: Positions, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        export_module(Broken(positions), "m", tmp_path, vocab_size=V, max_len=M)
    assert list(tmp_path.iterdir()) == []


def broken(frontend: FrontEnd, folder: Path, change: Callable[[onnx.GraphProto], None], graph: str) -> ShapeProbe:
    """Return the probe of a modified graph of `frontend`."""
    write_graphs(frontend.data(), folder)
    model = onnx.load(folder / graph, load_external_data=False)
    change(model.graph)
    onnx.save(model, folder / graph)
    return ShapeProbe(TorchReference(frontend), Session(folder, graph=graph), graph)


def replace_output(graph: onnx.GraphProto, *nodes: onnx.NodeProto, **constants: list[int]) -> None:
    """Add `nodes`, to compute the output of the graph from its old value, now named `before`."""
    output = graph.output[0].name
    last = next(node for node in graph.node if output in node.output)
    last.output[0] = "before"
    graph.node.extend(nodes)
    graph.initializer.extend(onnx.numpy_helper.from_array(torch.tensor(v).numpy(), k) for k, v in constants.items())


def cut_batch(graph: onnx.GraphProto) -> None:
    ends = {"starts": [0], "ends": [2], "axes": [0]}
    replace_output(graph, onnx.helper.make_node("Slice", ["before", *ends], [graph.output[0].name]), **ends)


def clamp(graph: onnx.GraphProto) -> None:
    gather = [node for node in graph.node if node.op_type == "Gather"][-1]
    limits = {"lowest": 0, "highest": M - 1}
    graph.initializer.extend(onnx.numpy_helper.from_array(torch.tensor(v).numpy(), k) for k, v in limits.items())
    place = list(graph.node).index(gather)
    graph.node.insert(place, onnx.helper.make_node("Clip", [gather.input[1], *limits], ["clamped"]))
    graph.node[place + 1].input[1] = "clamped"


@pytest.mark.parametrize(
    ("graph", "change", "message"),
    [
        ("model.onnx", cut_batch, r"^model\.onnx: axis batch is frozen: at batch 3 and length 5, .* \(2, 5, 6\)"),
        ("token.onnx", cut_batch, r"^token\.onnx: axis batch is frozen: at batch 3 and length 5, .* \(2, 5, 6\)"),
        ("model.onnx", clamp, r"^model\.onnx: positions are clamped: 9, beyond the last, gives the vectors of 8"),
    ],
)
def test_shape_probe_detects_frozen_axis_or_clamped_position(
    graph: str, change: Callable[[onnx.GraphProto], None], message: str, tmp_path: Path
) -> None:
    probe = broken(GPT2, tmp_path, change, graph)
    with pytest.raises(ParityError, match=message):
        probe.check()
