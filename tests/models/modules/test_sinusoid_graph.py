"""Sinusoids exported to ONNX, against the module: the same bits at every position."""

import numpy as np
import pytest
import torch

from preblock.models.modules.sinusoids import Sinusoid
from preblock.models.sinusoid_tables import POSITIONS
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
