"""Exact sinusoids against arbitrary precision, exported ones against the module, tables of libraries against theirs.

The default run covers a part of the survey `python -m tests.models.modules.test_sinusoids`. The survey takes several
minutes: 10^6 seeded positions (or its argument) for each of several widths, and as many pairs of values in mpmath.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.ctrl.modeling_ctrl import positional_encoding
from transformers.models.distilbert import modeling_distilbert
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding
from transformers.models.speech_to_text.modeling_speech_to_text import Speech2TextSinusoidalPositionalEmbedding
from transformers.models.whisper.modeling_whisper import sinusoids
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding
from transformers.models.xlm import modeling_xlm

from preblock.models.modules.sinusoids import COSINE, POSITIONS, RECIPES, SINE, Sinusoid, sinusoid

PRECISION = 160
"""Bits of every calculation in mpmath."""

WIDTHS_AND_BASES = pytest.mark.parametrize(
    ("d_model", "base"), [(512, 10000.0), (768, 10000.0), (48, 500.0), (10, 1e6), (6, 0.001)]
)
"""With a base less than 1, an angle advances by more than one turn per position."""


@lru_cache(maxsize=16)
def wavelengths(d_model: int, base: float) -> list[Any]:
    with mpmath.workprec(PRECISION):
        return [mpmath.power(base, mpmath.mpf(2 * pair) / d_model) for pair in range(d_model // 2)]


@lru_cache(maxsize=16)
def turns_per_position(d_model: int, base: float) -> list[int]:
    """Of every pair of columns, in units of 2^-128."""
    with mpmath.workprec(PRECISION):
        return [
            int(mpmath.nint(mpmath.ldexp(1 / (2 * mpmath.pi * wavelength), 128)))
            for wavelength in wavelengths(d_model, base)
        ]


def precise(position: int, pair: int, d_model: int, base: float = 10000.0) -> tuple[Any, Any]:
    """The sine and the cosine of one pair of columns by the formula of the paper."""
    with mpmath.workprec(PRECISION):
        angle = position / wavelengths(d_model, base)[pair]
        return mpmath.sin(angle), mpmath.cos(angle)


def units_off(found: float, exact: Any) -> float:
    """The distance of `found` from `exact`, in units in the last place of a float32 at `exact`."""
    with mpmath.workprec(PRECISION):
        if exact == 0:
            return 0.0 if found == 0 else math.inf
        return float(mpmath.ldexp(abs(found - exact), 24 - mpmath.frexp(exact)[1]))


def worst(places: Iterable[tuple[int, int]], d_model: int, base: float = 10000.0) -> float:
    """The largest distance from mpmath at the given places: position and pair of columns."""
    module, largest = Sinusoid(d_model, base), 0.0
    iterator = iter(places)
    while part := [place for _, place in zip(range(2048), iterator, strict=False)]:
        found = module(torch.tensor([position for position, _ in part])).tolist()
        for row, (position, pair) in zip(found, part, strict=True):
            for phase, exact in enumerate(precise(position, pair, d_model, base)):
                largest = max(largest, units_off(row[2 * pair + phase], exact))
    return largest


def reference(
    positions: NDArray[np.int64], pairs: NDArray[np.int64], d_model: int, base: float = 10000.0
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same values much faster: reduced to an eighth of a turn exactly in integers, then in long double.

    Where long double is float64, they are still right to 2^-27 units in the last place of a float32.
    """
    turns = turns_per_position(d_model, base)
    digits = np.array([[turn >> 32 * k & 0xFFFFFFFF for k in range(4)] for turn in turns], np.uint64)[pairs]
    fraction, carry = [], np.zeros(len(pairs), np.uint64)
    for k in range(4):  # from the lowest; whole turns run out at the top
        product = positions.astype(np.uint64) * digits[:, k] + carry
        fraction.append((product & np.uint64(0xFFFFFFFF)).astype(np.int64))
        carry = product >> np.uint64(32)
    quarters = fraction[3] + 2**29 >> 30
    fraction[3] -= quarters << 30
    negative = fraction[3] < 0
    angle = np.zeros(len(pairs), np.longdouble)
    for k, digit in enumerate(fraction):  # of a negative number the complement, so that nothing cancels
        angle += np.where(negative, ~digit if k == 3 else ~digit & 0xFFFFFFFF, digit) * np.longdouble(2) ** (
            32 * k - 128
        )
    angle *= np.where(negative, -1, 1) * np.longdouble("6.28318530717958647692528676655900577")
    sine, cosine = np.sin(angle), np.cos(angle)
    return (
        np.choose(quarters % 4, (sine, cosine, -sine, -cosine)),
        np.choose(quarters % 4, (cosine, -sine, -cosine, sine)),
    )


def units_off_reference(
    vectors: NDArray[np.float32], positions: NDArray[np.int64], pairs: NDArray[np.int64], d_model: int, base: float
) -> Iterator[NDArray[Any]]:
    """The distances of the sines, then of the cosines, of one pair of columns per row; the positions are not 0."""
    for phase, exact in enumerate(reference(positions, pairs, d_model, base)):
        distance = np.abs(vectors[np.arange(len(positions)), 2 * pairs + phase] - exact)
        yield np.ldexp(distance, 24 - np.frexp(exact)[1])


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


def bits(values: Tensor | NDArray[np.float32]) -> NDArray[np.int32]:
    return np.asarray(values).view(np.int32)


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


def powers_of_two_and_neighbours() -> list[int]:
    positions = {2**k + step for k in range(32) for step in (-1, 0, 1)}
    return sorted(position for position in positions if position < POSITIONS)


def closest_to_quarters(d_model: int, base: float) -> Iterator[tuple[int, int]]:
    """The places where an angle comes closer to a quarter, half or whole turn than at any position before.

    Continued fractions give them: the denominators of the convergents of quarters per position.
    """
    for pair, turns in enumerate(turns_per_position(d_model, base)):
        numerator, denominator = 4 * turns, 2**128
        before, position = 0, 1
        while position < POSITIONS:
            yield position, pair
            numerator, denominator = denominator, numerator % denominator
            before, position = position, before + position * (numerator // denominator)


@WIDTHS_AND_BASES
def test_powers_of_two_equal_mpmath_rounded_once(d_model: int, base: float) -> None:
    pairs = range(0, d_model // 2, 1 + d_model // 100)
    assert worst(((p, pair) for p in powers_of_two_and_neighbours() for pair in pairs), d_model, base) <= 0.501


@WIDTHS_AND_BASES
def test_powers_of_two_are_right_in_every_column(d_model: int, base: float) -> None:
    positions = np.array(powers_of_two_and_neighbours())[1:]
    found = Sinusoid(d_model, base)(torch.from_numpy(positions)).numpy()
    for pair in range(d_model // 2):
        pairs = np.full(len(positions), pair)
        assert all((off <= 0.501).all() for off in units_off_reference(found, positions, pairs, d_model, base)), pair


@WIDTHS_AND_BASES
def test_smallest_values_equal_mpmath_rounded_once(d_model: int, base: float) -> None:
    assert worst(closest_to_quarters(d_model, base), d_model, base) <= 0.501


@pytest.mark.parametrize("d_model", [32, 512, 768])
def test_random_values_are_mpmaths_values_rounded_once(d_model: int) -> None:
    assert worst(random_places(d_model, 3_000), d_model) <= 0.501


def random_places(d_model: int, count: int) -> Iterator[tuple[int, int]]:
    random = np.random.default_rng(count)
    yield from zip(
        random.integers(0, POSITIONS, count).tolist(), random.integers(0, d_model // 2, count).tolist(), strict=True
    )


@pytest.mark.parametrize(("d_model", "count", "columns"), [(16, 1_000_000, 1), (512, 20_000, 2), (768, 20_000, 2)])
def test_a_graph_gives_the_same_bits_and_they_are_right(d_model: int, count: int, columns: int) -> None:
    found = survey(d_model, count, columns)
    assert found.values == 2 * count * columns
    assert found.units_off <= 0.501
    assert found.other_bits_in_graph == 0


@WIDTHS_AND_BASES
def test_graph_has_the_bits_of_critical_positions(d_model: int, base: float) -> None:
    module = Sinusoid(d_model, base)
    positions = np.array(powers_of_two_and_neighbours() + [p for p, _ in closest_to_quarters(d_model, base)])
    expected = module(torch.from_numpy(positions))
    assert np.array_equal(bits(in_graph(session(d_model, base), positions)), bits(expected))


def test_the_quick_reference_is_mpmaths_value() -> None:
    places = [*random_places(512, 2000), *closest_to_quarters(512, 10000.0)]
    positions, pairs = np.array(places).T
    sines, cosines = reference(positions, pairs, 512)
    for place, *values in zip(places, sines, cosines, strict=True):
        for found, exact in zip(values, precise(*place, 512), strict=True):
            with mpmath.workprec(PRECISION):
                parts = float(found), float(found - float(found))
                assert abs(mpmath.fsum(parts) / exact - 1) < 2**-50, place


def test_a_float64_angle_is_wrong_where_values_are_small() -> None:
    places = list(closest_to_quarters(512, 10000.0))
    off = []
    for position, pair in places:
        angle = position / 10000.0 ** (2 * pair / 512)
        for found, exact in zip((math.sin(angle), math.cos(angle)), precise(position, pair, 512), strict=True):
            off.append(units_off(float(np.float32(found)), exact))
    assert max(off) > 1000


def test_graph_has_no_sine_no_table_no_rounded_constant() -> None:
    graph = exported(Sinusoid(512)).graph
    assert {"Sin", "Cos"}.isdisjoint(node.op_type for node in graph.node)
    constants = [onnx.numpy_helper.to_array(initializer) for initializer in graph.initializer]
    assert max(constant.size for constant in constants) == 512
    held = {float(constant) for constant in constants if constant.dtype == np.float64 and constant.ndim == 0}
    assert held >= {*SINE, *COSINE} - {1.0}


@pytest.mark.parametrize(("d_model", "pad_odd"), [(8, False), (7, True)])
@pytest.mark.parametrize("shape", [(1, 1), (4, 6), (0, 3), (3, 0)])
def test_the_graph_holds_no_size_of_its_sample(shape: tuple[int, int], d_model: int, pad_odd: bool) -> None:
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


@pytest.mark.parametrize(("name", "factor"), [("sin", SINE), ("cos", COSINE)])
def test_the_polynomials_are_right_to_54_bits(name: str, factor: tuple[float, ...]) -> None:
    with mpmath.workprec(PRECISION):
        for step in range(1, 1001):
            turn = (mpmath.mpf(1) / 8 + mpmath.mpf(2) ** -14) * step / 1000
            value = mpmath.polyval(list(reversed(factor)), turn * turn) * (turn if name == "sin" else 1)
            assert abs(value / getattr(mpmath, name)(2 * mpmath.pi * turn) - 1) < 2**-54


def test_a_value_does_not_depend_on_what_is_computed_beside_it() -> None:
    module, positions = Sinusoid(30), torch.randint(0, POSITIONS, (40, 25), generator=torch.Generator().manual_seed(0))
    rows = [module(position) for position in positions.flatten()]
    assert np.array_equal(bits(torch.stack(rows).reshape(40, 25, 30)), bits(module(positions)))


def test_backwards_the_sines_change_their_sign() -> None:
    positions = torch.tensor([1, 5, 10**6, POSITIONS - 1])
    forwards, backwards = sinusoid(positions, 64), sinusoid(-positions, 64)
    assert torch.equal(backwards[:, 0::2], -forwards[:, 0::2])
    assert torch.equal(backwards[:, 1::2], forwards[:, 1::2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_positions_have_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = sinusoid(torch.full(shape, 7, dtype=dtype), 8)
    assert found.shape == (*shape, 8)
    assert torch.equal(found, sinusoid(torch.tensor(7), 8).expand(*shape, 8))


def test_a_cast_of_the_module_does_not_round_its_constants() -> None:
    positions = torch.tensor([3, 10**6])
    assert torch.equal(Sinusoid(64).to(torch.bfloat16)(positions), Sinusoid(64)(positions))


def test_a_module_without_storage_has_real_constants() -> None:
    with torch.device("meta"):
        module = Sinusoid(64)
    assert torch.equal(module(torch.tensor([3])), Sinusoid(64)(torch.tensor([3])))


def test_nothing_is_trained_or_saved() -> None:
    assert Sinusoid(8).state_dict() == {}
    assert list(Sinusoid(8).parameters()) == []


@pytest.mark.parametrize("d_model", [1, 7])
def test_an_odd_width_is_refused_or_padded_with_zeros(d_model: int) -> None:
    with pytest.raises(ValueError, match=f"d_model: got {d_model}, expected an even width"):
        Sinusoid(d_model)
    found = sinusoid(torch.tensor([0, 1, 2**30]), d_model, pad_odd=True)
    assert found.shape == (3, d_model)
    assert (found[:, -1] == 0).all()
    for row, position in zip(found.tolist(), (0, 1, 2**30), strict=True):
        for pair in range(d_model // 2):
            for phase, exact in enumerate(precise(position, pair, d_model)):
                assert units_off(row[2 * pair + phase], exact) <= 0.501


def test_a_padded_width_is_exported() -> None:
    module, positions = Sinusoid(7, pad_odd=True), np.array([0, 1, 2**30])
    assert np.array_equal(bits(in_graph(session(7), positions)), bits(module(torch.from_numpy(positions))))


@pytest.mark.parametrize("d_model", [0, -2])
def test_a_width_below_one_is_refused(d_model: int) -> None:
    with pytest.raises(ValueError, match=f"d_model: got {d_model}, expected 1 or more"):
        Sinusoid(d_model)


@pytest.mark.parametrize("base", [0.0, -10.0, math.inf, math.nan])
def test_a_base_that_is_no_positive_number_is_refused(base: float) -> None:
    with pytest.raises(ValueError, match=f"base: got {base}, expected finite numbers greater than 0"):
        Sinusoid(8, base)


@pytest.mark.parametrize("position", [2**31, -(2**31), 2**62, -(2**63)])
def test_a_position_of_more_than_31_bits_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match=f"positions: got {position}, expected -2147483647 to 2147483647"):
        sinusoid(torch.tensor([0, position]), 8)


def interleaved_by(library: Any) -> Callable[[int, int], Tensor]:
    def create(rows: int, d_model: int) -> Tensor:
        table = torch.empty(rows, d_model)
        library.create_sinusoidal_embeddings(rows, d_model, table)
        return table

    return create


def half_by(library: Any) -> Callable[[int, int], Tensor]:
    return lambda rows, d_model: library(rows, d_model).create_weight()


def all_float32_by(library: Any) -> Callable[[int, int], Tensor]:
    return lambda rows, d_model: library(rows, d_model, torch.float32)


LIBRARY: dict[str, tuple[str, Callable[[int, int], Tensor]]] = {
    "marian": ("pair_half", half_by(MarianSinusoidalPositionalEmbedding)),
    "pegasus": ("pair_half", half_by(PegasusSinusoidalPositionalEmbedding)),
    "xlm": ("pair_interleaved", interleaved_by(modeling_xlm)),
    "distilbert": ("pair_interleaved", interleaved_by(modeling_distilbert)),
    "ctrl": ("pair_half_float32", all_float32_by(positional_encoding)),
    "m2m_100": ("tensor2tensor", M2M100SinusoidalPositionalEmbedding.get_embedding),
    "xglm": ("tensor2tensor", XGLMSinusoidalPositionalEmbedding.get_embedding),
    "speech_to_text": ("tensor2tensor", Speech2TextSinusoidalPositionalEmbedding.get_embedding),
    "whisper": ("tensor2tensor", sinusoids),
}
"""Of a family of transformers: the recipe of its table, and what builds it there."""

SHAPES = [(1, 4), (2, 6), (50, 256), (1024, 512), (1500, 384), (514, 768), (200, 1026)]
ODD_SHAPES = [(3, 5), (300, 63), (70, 511)]


@pytest.mark.parametrize(("rows", "d_model"), SHAPES)
@pytest.mark.parametrize("family", LIBRARY)
def test_a_table_is_the_librarys_to_the_bit(family: str, rows: int, d_model: int) -> None:
    recipe, library = LIBRARY[family]
    found = RECIPES[recipe](rows, d_model)
    assert found.dtype == torch.float32
    assert np.array_equal(bits(found), bits(library(rows, d_model)))


@pytest.mark.parametrize(("rows", "d_model"), ODD_SHAPES)
@pytest.mark.parametrize("family", [family for family in LIBRARY if family != "whisper"])
def test_a_table_of_odd_width_is_the_librarys_to_the_bit(family: str, rows: int, d_model: int) -> None:
    recipe, library = LIBRARY[family]
    assert np.array_equal(bits(RECIPES[recipe](rows, d_model)), bits(library(rows, d_model)))


@pytest.mark.parametrize("padding_idx", [0, 1, 39])
@pytest.mark.parametrize(
    "library",
    [
        M2M100SinusoidalPositionalEmbedding,
        XGLMSinusoidalPositionalEmbedding,
        Speech2TextSinusoidalPositionalEmbedding,
    ],
)
def test_the_padding_row_is_zero_as_in_the_library(library: Any, padding_idx: int) -> None:
    found = RECIPES["tensor2tensor"](40, 24, padding_idx)
    assert np.array_equal(bits(found), bits(library.get_embedding(40, 24, padding_idx)))
    assert (found[padding_idx] == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_padding_row_is_zeroed(recipe: str) -> None:
    expected = RECIPES[recipe](9, 8)
    expected[5] = 0
    assert torch.equal(RECIPES[recipe](9, 8, 5), expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("padding_idx", [-1, 9])
def test_a_padding_row_outside_the_table_is_refused(recipe: str, padding_idx: int) -> None:
    with pytest.raises(ValueError, match=f"padding_idx: got {padding_idx}, expected 0 to 8"):
        RECIPES[recipe](9, 8, padding_idx)


@pytest.mark.parametrize("d_model", [2, 3])
def test_tensor2tensor_refuses_a_width_that_divides_by_zero(d_model: int) -> None:
    with pytest.raises(ValueError, match=f"d_model: got {d_model}, expected 4 or more"):
        RECIPES["tensor2tensor"](4, d_model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_table_is_real_on_the_meta_device(recipe: str) -> None:
    with torch.device("meta"):
        found = RECIPES[recipe](9, 8)
    assert torch.equal(found, RECIPES[recipe](9, 8))


def main(count: int) -> None:
    """Survey `count` positions of every width, and report."""
    for d_model in (16, 512, 768):
        sys.stdout.write(f"D {d_model}, {count} positions: {survey(d_model, count, min(d_model // 2, 32))}\n")
        sys.stdout.write(f"D {d_model}, {count} pairs in mpmath: {worst(random_places(d_model, count), d_model)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
