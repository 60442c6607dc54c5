"""Writes the steps of a front-end as ONNX nodes: a function for each kind of step.

Letters: B batch, L length.
"""

from collections.abc import Sequence
from functools import partial, reduce
from itertools import count

import numpy as np

from preblock.export.graph_builder import Array, GraphBuilder, rounded_number
from preblock.models.config import FrontEndConfig
from preblock.models.sinusoid_tables import COSINE, SINE, exact_sinusoids, library_table, turns_per_position
from preblock.models.steps import (
    Levels,
    Mask,
    Norm,
    Positions,
    Project,
    RmsNorm,
    Scale,
    Segments,
    Step,
    Tokens,
    Weights,
    names_of,
)

INPUT_IDS, OFFSET, MASK = "input_ids", "offset", "attention_mask"
TABLE_CHUNK = 1024
"""Positions of a table of sinusoids computed at once, to bound the working memory."""


def write_steps(graph: GraphBuilder, config: FrontEndConfig, count: int | None = None) -> str:
    """Write the first `count` steps, by default all, and return their vectors."""
    x = INPUT_IDS
    for name, step in list(zip(names_of(config.steps), config.steps, strict=True))[:count]:
        x = _write_rounding(graph, config, _write_step(graph, config, name, step, x))
    return x


def _write_step(graph: GraphBuilder, config: FrontEndConfig, name: str, step: Step, x: str) -> str:
    """Write a step, and return its vectors in float32; `x` are those of the step before it."""
    match step:
        case Tokens():
            return graph.rows(f"{name}.vectors", f"{name}.weight", INPUT_IDS)
        case Scale():
            return _write_scale(graph, config, name, step, x)
        case Weights():
            factors = graph.rows(f"{name}.factors", f"{name}.weight", INPUT_IDS)
            return graph.add(f"{name}.product", "Mul", x, factors)
        case Segments():
            return graph.add(f"{name}.sum", "Add", x, _write_index(graph, config, name, step))
        case Levels():
            return _write_levels(graph, config, name, step, x)
        case Positions():
            return graph.add(f"{name}.sum", "Add", x, _write_positions(graph, config, name, step))
        case Mask():
            return _write_mask(graph, name, x)
        case Norm():
            return _write_norm(graph, name, step, x)
        case RmsNorm():
            return _write_rms_norm(graph, name, step, x)
        case Project():
            return _write_projection(graph, name, step, x)


def _write_rounding(graph: GraphBuilder, config: FrontEndConfig, x: str) -> str:
    """Round to the type of the arithmetic, as a library does after each step; nothing for float32."""
    if config.arithmetic == "float32":
        return x
    return graph.cast(f"{x}.rounded", graph.cast(f"{x}.{config.arithmetic}", x, config.arithmetic), "float32")


def _write_scale(graph: GraphBuilder, config: FrontEndConfig, name: str, step: Scale, x: str) -> str:
    by = rounded_number(step.by, config.arithmetic) if step.cast else step.by
    return graph.add(f"{name}.product", "Mul", x, graph.number(by, "float32"))


def _write_index(graph: GraphBuilder, config: FrontEndConfig, name: str, step: Segments) -> str:
    """Write the vectors of the index of `step`; the table of its own is `<name>.weight`."""
    table = "tokens.weight" if step.table == "tokens" else f"{name}.weight"
    vectors = graph.rows(f"{name}.vectors", table, step.input)
    if step.by == 1:
        return vectors
    return _write_rounding(
        graph, config, graph.add(f"{name}.product", "Mul", vectors, graph.number(step.by, "float32"))
    )


def _write_levels(graph: GraphBuilder, config: FrontEndConfig, name: str, step: Levels, x: str) -> str:
    """Write x + (sum of the levels, in their order)."""
    levels = [_write_index(graph, config, f"{name}.{place}", level) for place, level in enumerate(step.levels)]
    total = levels[0]
    for place, level in enumerate(levels[1:], 1):
        total = graph.add(f"{name}.{place}.sum", "Add", total, level)
    return graph.add(f"{name}.sum", "Add", x, total)


def _write_mask(graph: GraphBuilder, name: str, x: str) -> str:
    column = graph.add(f"{name}.column", "Unsqueeze", MASK, graph.numbers(-1))
    return graph.add(f"{name}.product", "Mul", x, graph.cast(f"{name}.factor", column, "float32"))


def _write_norm(graph: GraphBuilder, name: str, step: Norm, x: str) -> str:
    bias = [] if step.bias is None else [graph.weight(f"{name}.bias")]
    weight = graph.weight(f"{name}.weight")
    return graph.add(f"{name}.normed", "LayerNormalization", x, weight, *bias, axis=-1, epsilon=step.eps)


def _write_rms_norm(graph: GraphBuilder, name: str, step: RmsNorm, x: str) -> str:
    square = graph.add(f"{name}.square", "Pow", x, graph.number(2.0, "float32"))
    mean = graph.add(f"{name}.mean", "ReduceMean", square, graph.numbers(-1), keepdims=1)
    shifted = graph.add(f"{name}.shifted_mean", "Add", mean, graph.number(step.eps, "float32"))
    root = graph.add(f"{name}.root", "Sqrt", shifted)
    normed = graph.add(f"{name}.normed", "Mul", x, graph.add(f"{name}.reciprocal", "Reciprocal", root))
    if step.weight is None:
        return normed
    return graph.add(f"{name}.product", "Mul", normed, graph.weight(f"{name}.weight"))


def write_product(graph: GraphBuilder, name: str, x: str) -> str:
    """Write the product of `x` and the trained weight `<name>.weight`, stored transposed, (in, out)."""
    return graph.add(f"{name}.product", "MatMul", x, graph.weight(f"{name}.weight"))


def _write_projection(graph: GraphBuilder, name: str, step: Project, x: str) -> str:
    product = write_product(graph, name, x)
    if step.bias is None:
        return product
    return graph.add(f"{name}.sum", "Add", product, graph.weight(f"{name}.bias"))


def _write_positions(graph: GraphBuilder, config: FrontEndConfig, name: str, step: Positions) -> str:
    """Write the vectors of positions, (1 or B, L, width)."""
    width = next(width for width, part in zip(config.widths, config.steps, strict=True) if part is step)
    row = _write_position_row(graph, config, name, step)
    vectors, weight = f"{name}.vectors", f"{name}.weight"
    match step:
        case Positions(grid=(_, columns), table="factorised"):
            count = graph.number(columns, "int64")
            of_row = graph.rows(
                f"{name}.rows.vectors", f"{name}.rows.weight", graph.add(f"{name}.row", "Div", row, count)
            )
            column = graph.add(f"{name}.column", "Mod", row, count)
            of_column = graph.rows(f"{name}.columns.vectors", f"{name}.columns.weight", column)
            return graph.add(vectors, "Add", of_row, of_column)
        case Positions(table="learned"):
            return graph.rows(vectors, weight, row)
        case Positions(table="hybrid"):
            end = graph.number(step.rows, "int64")
            clipped = graph.add(f"{name}.learned_row", "Clip", row, "", graph.number(step.rows - 1, "int64"))
            learned = graph.rows(f"{name}.learned", weight, clipped)
            beyond = _write_sinusoids(graph, name, row, width)
            early = graph.add(
                f"{name}.early", "Unsqueeze", graph.add(f"{name}.is_early", "Less", row, end), graph.numbers(-1)
            )
            return graph.add(vectors, "Where", early, learned, beyond)
        case Positions(table="exact", grid=None, rows=0):
            return _write_sinusoids(graph, name, row, width)
        case _:
            table = graph.derived(f"{name}.table", lambda: _position_table(config, step, width))
            return graph.add(vectors, "Gather", table, row, axis=0)


def _position_table(config: FrontEndConfig, step: Positions, width: int) -> Array:
    """Return the derived table of positions, float32."""
    if step.grid is not None:
        rows, columns = step.grid
        axis = _exact_table(max(rows, columns), width // 2)
        cells = np.arange(step.cells)
        return np.concatenate((axis[cells // columns], axis[cells % columns]), axis=1)
    if step.table == "exact":
        return _exact_table(step.rows, width)
    table = library_table(step.table, step.rows, width, step.zero_row)
    return table.astype(config.arithmetic).astype(np.float32)


def _exact_table(rows: int, width: int) -> Array:
    parts = [np.arange(begin, min(begin + TABLE_CHUNK, rows)) for begin in range(0, rows, TABLE_CHUNK)]
    return np.concatenate([exact_sinusoids(part, width) for part in parts])


def _write_position_row(graph: GraphBuilder, config: FrontEndConfig, name: str, step: Positions) -> str:
    """Write the row of each token in the table of positions, int64 (1 or B, L)."""
    if step.counts == "slots":
        row, shift = write_position_index(graph), step.first
    else:
        real = MASK if step.counts == "mask" else _write_real_tokens(graph, config, name)
        before = graph.add(f"{name}.count", "CumSum", real, graph.number(1, "int64"))
        counted = graph.add(f"{name}.reached", "Add", _write_start(graph), before)
        row, shift = graph.add(f"{name}.real", "Mul", counted, real), step.first - 1
    return graph.add(f"{name}.table_row", "Add", row, graph.number(shift, "int64")) if shift else row


def _write_real_tokens(graph: GraphBuilder, config: FrontEndConfig, name: str) -> str:
    """Write 1 for each id other than padding, and 0 for padding."""
    padding = graph.add(f"{name}.is_padding", "Equal", INPUT_IDS, graph.number(config.padding_idx or 0, "int64"))
    return graph.cast(f"{name}.is_real", graph.add(f"{name}.is_token", "Not", padding), "int64")


def write_position_index(graph: GraphBuilder) -> str:
    """Write the position index of each slot, int64 (1 or B, L), once in a graph."""

    def build() -> str:
        sizes = graph.add("index.sizes", "Shape", INPUT_IDS, start=1, end=2)
        length = graph.add("index.length", "Squeeze", sizes)
        zero, one = graph.number(0, "int64"), graph.number(1, "int64")
        return graph.add(
            "index.position", "Add", graph.add("index.slot", "Range", zero, length, one), _write_start(graph)
        )

    return graph.once("index.position", build)


def _write_start(graph: GraphBuilder) -> str:
    """Write the offset as a column, (1 or B, 1)."""
    return graph.add("index.start", "Reshape", OFFSET, graph.numbers(-1, 1))


def _write_sinusoids(graph: GraphBuilder, name: str, row: str, width: int) -> str:
    """Write the exact sinusoids of `row` (...), float32 (..., width), by sums, products and roundings alone.

    The order of the operations is that of `preblock.models.sinusoid_tables`, because the bits depend on it.
    """
    numbers = count()

    def do(op: str, *values: str) -> str:
        return graph.add(f"{name}.sinusoid.{next(numbers)}", op, *values)

    def number(value: float) -> str:
        return graph.number(value, "float64")

    def polynomial(x: str, coefficients: Sequence[float]) -> str:
        return reduce(
            lambda value, factor: do("Add", do("Mul", value, x), number(factor)),
            coefficients[-2::-1],
            number(coefficients[-1]),
        )

    turns = [
        graph.derived(f"{name}.turns.{place}", partial(np.array, part, np.float64))
        for place, part in enumerate(turns_per_position(width))
    ]
    column = do("Unsqueeze", row, graph.numbers(-1))
    position = graph.cast(f"{name}.position", column, "float64")
    turn = do("Mul", position, turns[0])
    turn = do("Sub", turn, do("Round", turn))
    turn = do("Add", turn, do("Mul", position, turns[1]))
    turn = do("Sub", turn, do("Round", turn))
    quarters = do("Round", do("Mul", turn, number(4.0)))
    angle = do("Sub", turn, do("Mul", quarters, number(0.25)))
    angle = do("Add", angle, do("Mul", position, turns[2]))
    angle = do("Add", angle, do("Mul", position, turns[3]))
    square = do("Mul", angle, angle)
    sine = graph.cast(f"{name}.sine", do("Mul", angle, polynomial(square, SINE)), "float32")
    cosine = graph.cast(f"{name}.cosine", polynomial(square, COSINE), "float32")
    return _write_rotation(graph, name, graph.cast(f"{name}.quarters", quarters, "float32"), (sine, cosine), width)


def _write_rotation(graph: GraphBuilder, name: str, quarters: str, parts: tuple[str, str], width: int) -> str:
    """Rotate sines and cosines by -2 to 2 quarters, and put them side by side in pairs.

    The rotation is exact: its cosine and sine are 0, 1 or -1.
    """
    sine, cosine = parts
    one, two = graph.number(1.0, "float32"), graph.number(2.0, "float32")
    turned = graph.add(f"{name}.turned", "Abs", quarters)
    along = graph.add(f"{name}.along", "Sub", one, turned)
    across = graph.add(f"{name}.across", "Mul", quarters, graph.add(f"{name}.rest", "Sub", two, turned))

    def product(part: str, factor: str, value: str) -> str:
        return graph.add(f"{name}.{part}", "Mul", factor, value)

    sines = graph.add(
        f"{name}.sines", "Add", product("sine_along", along, sine), product("cosine_across", across, cosine)
    )
    cosines = graph.add(
        f"{name}.cosines", "Sub", product("cosine_along", along, cosine), product("sine_across", across, sine)
    )
    halves = graph.add(f"{name}.halves", "Concat", sines, cosines, axis=-1)
    order = graph.derived(f"{name}.order", lambda: np.arange(width).reshape(2, -1).T.ravel())
    return graph.add(f"{name}.sinusoids", "Gather", halves, order, axis=-1)
