"""Sinusoids exported to ONNX, against the module: the same bits at every position."""

import math

import numpy as np
import onnx
import pytest
import torch

from preblock.models.modules.sinusoids import Sinusoid
from preblock.models.sinusoid_tables import COSINE, POSITIONS, SINE
from tests.models.modules.graphs import graph_of, session_of
from tests.models.modules.precise_sinusoids import bits, closest_to_quarters, powers_of_two_and_neighbours

SAMPLE = {"positions": torch.zeros((2, 3), dtype=torch.int64)}


@pytest.mark.parametrize(("d_model", "base"), [(6, 0.001), (768, 10000.0)])
def test_graph_equals_module_bits(d_model: int, base: float) -> None:
    module, random = Sinusoid(d_model, base), np.random.default_rng(d_model).integers(1, POSITIONS, 5_000)
    shapes = {"positions": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
    graph = session_of(graph_of(module, SAMPLE, shapes))
    critical = powers_of_two_and_neighbours() + [position for position, _ in closest_to_quarters(d_model, base)]
    for positions in (random, np.array(critical)):
        found = graph.run(None, {"positions": positions[None]})[0][0]
        assert np.array_equal(bits(found), bits(module(torch.from_numpy(positions))))


@pytest.mark.parametrize("d_model", [7, 512])
def test_graph_has_no_fixed_sizes_and_no_rounded_constants(d_model: int) -> None:
    module = Sinusoid(d_model, pad_odd=True)
    model = graph_of(module, SAMPLE)
    assert {"Sin", "Cos"}.isdisjoint(node.op_type for node in model.graph.node)
    constants = [onnx.numpy_helper.to_array(initializer) for initializer in model.graph.initializer]
    assert max(constant.size for constant in constants) <= 512
    held = {float(constant) for constant in constants if constant.dtype == np.float64 and constant.ndim == 0}
    assert held >= {*SINE, *COSINE} - {1.0}
    del model.graph.value_info[:]
    for end in (*model.graph.input, *model.graph.output):
        for size in end.type.tensor_type.shape.dim:
            size.Clear()
    graph = session_of(model)
    for shape in ((1, 1), (4, 6), (0, 3), (3, 0)):
        positions = np.arange(math.prod(shape)).reshape(shape) * 2**20
        expected = module(torch.from_numpy(positions))
        assert np.array_equal(bits(graph.run(None, {"positions": positions})[0]), bits(expected)), shape
