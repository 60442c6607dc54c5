"""Writes the ONNX graph of a front-end: dynamic axes, weights in one external data file, nothing of this machine.

Letters: B batch, L length, D output width.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from incipit.models.frontend import FrontEnd
from incipit.service.manifest import DATA, GRAPH
from incipit.service.manifest import Tensor as TensorSpec

OPSET = 20
MODULE, DERIVED = "frontend.", ".table"
"""In the names of initializers: what the exported module calls the front-end, and what ends a derived table's."""


class _Signature(nn.Module):
    """The front-end with exactly the inputs of its graph, in order."""

    def __init__(self, frontend: FrontEnd) -> None:
        super().__init__()
        self.frontend = frontend

    def forward(self, input_ids: Tensor, offset: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        vectors: Tensor = self.frontend(input_ids, offset, token_type_ids)
        return vectors


def export_graph(frontend: FrontEnd, folder: Path) -> None:
    """Write `model.onnx` and `model.onnx.data` of `frontend` (in evaluation mode) into `folder`.

    Inputs int64 `input_ids` (batch, length), `offset` (1,) or (batch,), and `token_type_ids` (batch, length) where
    the front-end has segments; output float32 `embeddings` (batch, length, D).
    """
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    # Any sizes do, except that `offset` has one element, so that (1,) broadcasts over the batch in the graph.
    names = ["input_ids", "offset"]
    samples = [torch.zeros((2, 3), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)]
    shapes: list[dict[int, torch.export.Dim] | None] = [{0: batch, 1: length}, None]
    if frontend.segments is not None:
        # A tensor of its own: the exporter makes one input of two arguments that are the same tensor.
        names, samples, shapes = (
            [*names, "token_type_ids"],
            [*samples, samples[0].clone()],
            [*shapes, shapes[0]],
        )
    with _quiet_exporter():
        program = torch.onnx.export(
            _Signature(frontend).eval(),
            tuple(samples),
            dynamo=True,
            opset_version=OPSET,
            input_names=names,
            output_names=["embeddings"],
            dynamic_shapes=shapes,
            verbose=False,
        )
    assert program is not None
    program.save(folder / GRAPH, external_data=True)
    model = onnx.load(folder / GRAPH, load_external_data=False)
    _forget_machine(model)
    _free_offset(model)
    onnx.save(model, folder / GRAPH)
    onnx.checker.check_model(folder / GRAPH, full_check=True)
    assert (folder / DATA).is_file()


def describe_graph(graph: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs of the ONNX file `graph`."""
    model = onnx.load(graph, load_external_data=False)
    return tuple(map(_spec, model.graph.input)), tuple(map(_spec, model.graph.output))


def read_initializers(folder: Path) -> dict[str, Tensor]:
    """Return the trained weights that an artifact holds, under the names of `FrontEnd.state_dict()`.

    Derived tables (sinusoids) are left out: who builds the module again derives them again.
    """
    model = onnx.load(folder / GRAPH)
    return {
        initializer.name.removeprefix(MODULE): torch.from_numpy(onnx.numpy_helper.to_array(initializer).copy())
        for initializer in model.graph.initializer
        if initializer.name.startswith(MODULE) and not initializer.name.endswith(DERIVED)
    }


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence what the exporter says of libraries that a front-end does not use, and of its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _forget_machine(model: onnx.ModelProto) -> None:
    """Clear what the exporter notes on the side: source paths and stack traces of this machine."""
    graph = model.graph
    for part in (
        model,
        graph,
        *graph.node,
        *graph.value_info,
        *graph.input,
        *graph.output,
        *graph.initializer,
    ):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def _free_offset(model: onnx.ModelProto) -> None:
    """Let `offset` be of shape (1,) or (batch,): exported with one element, it broadcasts in either case."""
    del model.graph.value_info[:]  # shapes inferred for one element
    offset = next(node for node in model.graph.input if node.name == "offset")
    offset.type.tensor_type.shape.dim[0].dim_param = "offsets"


def _spec(node: onnx.ValueInfoProto) -> TensorSpec:
    tensor = node.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return TensorSpec(name=node.name, dtype=dtype, shape=tuple(d.dim_param or d.dim_value for d in tensor.shape.dim))
