"""Sinusoids exported to ONNX, against the module and arbitrary precision.

The default run covers a part of the survey `python -m tests.models.modules.test_sinusoid_graph`. The survey
takes several minutes: 10^6 seeded positions (or its argument) for each of several widths, and as many pairs of values
in mpmath.
"""

import math
import sys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from preblock.models.modules.sinusoids import COSINE, POSITIONS, SINE, Sinusoid
from tests.models.modules.graphs import graph_of, session_of
from tests.models.modules.precise_sinusoids import (
    bits,
    closest_to_quarters,
    powers_of_two_and_neighbours,
    random_places,
    units_off_reference,
    worst,
)


@lru_cache(maxsize=16)
def session(d_model: int, base: float = 10000.0) -> onnxruntime.InferenceSession:
    """The graph of a module, from a sample of (2, 3) positions."""
    sample = {"positions": torch.zeros((2, 3), dtype=torch.int64)}
    shapes = {"positions": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
    return session_of(graph_of(Sinusoid(d_model, base, pad_odd=True), sample, shapes))


def in_graph(graph: onnxruntime.InferenceSession, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """The vectors of `positions` (L,), as onnxruntime computes them."""
    found: NDArray[np.float32] = graph.run(None, {"positions": positions[None]})[0][0]
    return found


@dataclass
class Survey:
    """Result of a survey: number of values, largest distance, and wrong values by kind."""

    values: int = 0
    units_off: float = 0.0
    above_limit: int = 0
    not_nearest: int = 0
    other_bits_in_graph: int = 0


def survey(d_model: int, count: int, columns: int, base: float = 10000.0) -> Survey:
    """Compare `count` positions with the reference in `columns` random pairs each, and with onnxruntime in all."""
    module, random, result = Sinusoid(d_model, base), np.random.default_rng(d_model), Survey()
    graph, step = session(d_model, base), 2**20 // d_model
    for start in range(0, count, step):
        positions = random.integers(1, POSITIONS, min(step, count - start))
        found = module(torch.from_numpy(positions)).numpy()
        result.other_bits_in_graph += int((bits(found) != bits(in_graph(graph, positions))).sum())
        for _ in range(columns):
            pairs = random.integers(0, d_model // 2, len(positions))
            for off in units_off_reference(found, positions, pairs, d_model, base):
                result.values += off.size
                result.units_off = max(result.units_off, float(off.max()))
                result.above_limit += int((off > 0.501).sum())
                result.not_nearest += int((off > 0.5).sum())
    return result


@pytest.mark.parametrize(("d_model", "count", "columns"), [(6, 100_000, 1), (768, 20_000, 2)])
def test_graph_equals_module_bits_and_reference(d_model: int, count: int, columns: int) -> None:
    base = 0.001 if d_model == 6 else 10000.0
    found = survey(d_model, count, columns, base)
    assert found.values == 2 * count * columns
    assert found.units_off <= 0.501
    assert found.other_bits_in_graph == 0
    positions = np.array(powers_of_two_and_neighbours() + [p for p, _ in closest_to_quarters(d_model, base)])
    expected = Sinusoid(d_model, base)(torch.from_numpy(positions))
    assert np.array_equal(bits(in_graph(session(d_model, base), positions)), bits(expected))


@pytest.mark.parametrize("d_model", [7, 512])
def test_graph_has_no_fixed_sizes_and_no_rounded_constants(d_model: int) -> None:
    module = Sinusoid(d_model, pad_odd=True)
    model = graph_of(module, {"positions": torch.zeros((2, 3), dtype=torch.int64)})
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


def main(count: int) -> None:
    """Survey `count` positions of every width, and report."""
    for d_model in (16, 512, 768):
        sys.stdout.write(f"D {d_model}, {count} positions: {survey(d_model, count, min(d_model // 2, 32))}\n")
        sys.stdout.write(f"D {d_model}, {count} pairs in mpmath: {worst(random_places(d_model, count), d_model)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
