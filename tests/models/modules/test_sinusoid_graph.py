"""Sinusoids exported to ONNX, against the module and arbitrary precision.

The default run covers a part of the survey `python -m tests.models.modules.test_sinusoid_graph`. The survey
takes several minutes: 10^6 seeded positions (or its argument) for each of several widths, and as many pairs of values
in mpmath.
"""

import math
import sys
import warnings
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from preblock.models.modules.sinusoids import COSINE, POSITIONS, SINE, Sinusoid
from tests.models.modules.precise_sinusoids import (
    WIDTHS_AND_BASES,
    bits,
    closest_to_quarters,
    powers_of_two_and_neighbours,
    random_places,
    units_off_reference,
    worst,
)


def exported(module: torch.nn.Module, dynamic: bool = True) -> onnx.ModelProto:
    """The graph of `module`, from a sample of (2, 3) positions."""
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},) if dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about itself
        program = torch.onnx.export(
            module,
            (torch.zeros((2, 3), dtype=torch.int64),),
            dynamo=True,
            opset_version=20,
            input_names=["positions"],
            dynamic_shapes=shapes,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


@lru_cache(maxsize=16)
def session(d_model: int, base: float = 10000.0) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    graph = exported(Sinusoid(d_model, base, pad_odd=True)).SerializeToString()
    return onnxruntime.InferenceSession(graph, options, ["CPUExecutionProvider"])


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


@pytest.mark.parametrize(("d_model", "count", "columns"), [(16, 1_000_000, 1), (512, 20_000, 2), (768, 20_000, 2)])
def test_graph_equals_module_bits_and_reference(d_model: int, count: int, columns: int) -> None:
    found = survey(d_model, count, columns)
    assert found.values == 2 * count * columns
    assert found.units_off <= 0.501
    assert found.other_bits_in_graph == 0


@WIDTHS_AND_BASES
def test_graph_equals_module_bits_at_critical_positions(d_model: int, base: float) -> None:
    module = Sinusoid(d_model, base)
    positions = np.array(powers_of_two_and_neighbours() + [p for p, _ in closest_to_quarters(d_model, base)])
    expected = module(torch.from_numpy(positions))
    assert np.array_equal(bits(in_graph(session(d_model, base), positions)), bits(expected))


def test_graph_has_no_sine_no_table_no_rounded_constant() -> None:
    graph = exported(Sinusoid(512)).graph
    assert {"Sin", "Cos"}.isdisjoint(node.op_type for node in graph.node)
    constants = [onnx.numpy_helper.to_array(initializer) for initializer in graph.initializer]
    assert max(constant.size for constant in constants) == 512
    held = {float(constant) for constant in constants if constant.dtype == np.float64 and constant.ndim == 0}
    assert held >= {*SINE, *COSINE} - {1.0}


@pytest.mark.parametrize(("d_model", "pad_odd"), [(8, False), (7, True)])
@pytest.mark.parametrize("shape", [(1, 1), (4, 6), (0, 3), (3, 0)])
def test_graph_has_no_fixed_sample_size(shape: tuple[int, int], d_model: int, pad_odd: bool) -> None:
    module = Sinusoid(d_model, pad_odd=pad_odd)
    model = exported(module, dynamic=False)
    del model.graph.value_info[:]
    for end in (*model.graph.input, *model.graph.output):
        for size in end.type.tensor_type.shape.dim:
            size.Clear()
    graph = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    positions = np.arange(math.prod(shape)).reshape(shape)
    expected = module(torch.from_numpy(positions))
    assert np.array_equal(bits(graph.run(None, {"positions": positions})[0]), bits(expected))


def test_exported_padded_width_equals_module() -> None:
    module, positions = Sinusoid(7, pad_odd=True), np.array([0, 1, 2**30])
    assert np.array_equal(bits(in_graph(session(7), positions)), bits(module(torch.from_numpy(positions))))


def main(count: int) -> None:
    """Survey `count` positions of every width, and report."""
    for d_model in (16, 512, 768):
        sys.stdout.write(f"D {d_model}, {count} positions: {survey(d_model, count, min(d_model // 2, 32))}\n")
        sys.stdout.write(f"D {d_model}, {count} pairs in mpmath: {worst(random_places(d_model, count), d_model)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
