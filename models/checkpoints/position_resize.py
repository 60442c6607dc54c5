"""Resizes learned position tables (M, D) to another length, by a method of the caller's choice.

Nothing is resized automatically: modules reject input longer than their table. Rows are the positions 0 to M - 1.
Leading rows of another meaning (padding, in some published models) are kept as they are.

Letters: D model width, M rows of the table.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from preblock.models.config import MAX_TABLE_ROWS
from preblock.models.frontend_data import Array, FrontEndData
from preblock.models.sinusoid_tables import exact_sinusoids
from preblock.models.steps import names_of


def truncate(table: Array, length: int) -> Array:
    """Return the first `length` rows of `table` (M, D), as a copy.

    Raises:
        ValueError: `length` is outside 1 to M.

    """
    if not 1 <= length <= len(table):
        raise ValueError(f"length: got {length}, expected 1 to {len(table)}: truncation does not lengthen a table")
    return table[:length].copy()  # a view would keep, and save, all the rows


def interpolate(table: Array, length: int) -> Array:
    """Stretch `table` (M, D) to (length, D) linearly, as before fine-tuning on longer inputs.

    The ends are aligned: the first row stays first and the last stays last, and new row i lies at
    i * (M - 1) / (length - 1) of the old ones. So a table resized to its own length is unchanged.
    (`torch.nn.functional.interpolate` with `align_corners=True`.)

    Raises:
        ValueError: `length` is less than M.

    """
    rows = _check_longer(table, length)
    return _between(table, np.arange(length) * (rows - 1), max(length - 1, 1))


def interpolate_positions(table: Array, length: int) -> Array:
    """Scale positions down by M / length, and read `table` (M, D) there, linearly between rows (Chen et al. 2023).

    New row i has the place i * M / length among the old ones: distances shrink by exactly that factor. At twice the
    length, every other row is an old one. The few positions beyond the last old row, M - 1, have no second neighbour
    and take that row. At its own length a table is unchanged.

    Raises:
        ValueError: `length` is less than M.

    """
    rows = _check_longer(table, length)
    return _between(table, np.arange(length) * rows, length)


def hybrid(table: Array, length: int) -> Array:
    """Keep the rows of `table` (M, D), and add the sinusoids of the positions M to length - 1.

    Raises:
        ValueError: `length` is less than M, or D is odd.

    """
    rows = _check_longer(table, length)
    beyond = exact_sinusoids(np.arange(rows, length), table.shape[1])
    return np.concatenate((table, beyond.astype(table.dtype)))


RESIZINGS: dict[str, Callable[[Array, int], Array]] = {
    "truncate": truncate,
    "interpolate": interpolate,
    "interpolate_positions": interpolate_positions,
    "hybrid": hybrid,
}
"""Resizing methods by name. The default rejects lengths beyond M, and needs no method."""


def _check_longer(table: Array, length: int) -> int:
    if length < len(table):
        raise ValueError(f"length: got {length}, expected {len(table)} or more; to shorten a table, truncate it")
    return len(table)


def _between(table: Array, numerators: NDArray[np.int64], denominator: int) -> Array:
    """Return the rows of `table` at the positions `numerators / denominator`, linearly between its own."""
    resized = np.empty((len(numerators), table.shape[1]), table.dtype)
    for begin in range(0, len(numerators), 1024):  # float64 takes memory
        part = numerators[begin : begin + 1024]
        # Integer division is exact: no quotient falls just below its row.
        lower = part // denominator
        upper = np.minimum(lower + 1, len(table) - 1)
        share = (part % denominator)[:, None] / denominator
        first, second = (table[rows].astype(np.float64) for rows in (lower, upper))
        resized[begin : begin + 1024] = first + share * (second - first)
    return resized


def resize_positions(frontend: FrontEndData, max_len: int, resizing: str | None = None) -> FrontEndData:
    """Return `frontend` with another limit. All tensors except the resized table are shared, not copied.

    Args:
        frontend: front-end of M positions.
        max_len: the new M.
        resizing: a key of RESIZINGS for a learned table; None for derived positions or none.

    Raises:
        ValueError: `resizing` is missing, unknown, not for these positions, or cannot produce the length.

    """
    config, positions = frontend.config, frontend.config.positions
    tensors = dict(frontend.tensors)
    if positions is not None and positions.grid:
        raise ValueError(f"max_len: got {max_len}, expected {config.max_len}, the cells of a grid")
    if positions is None or positions.table != "learned":
        if resizing is not None:
            raise ValueError(f"resize: got {resizing!r}, expected only for a learned table of positions")
    else:
        if max_len > MAX_TABLE_ROWS:
            raise ValueError(f"max_len: got {max_len}, expected at most {MAX_TABLE_ROWS}, the rows of a table")
        if resizing not in RESIZINGS:
            got = "nothing" if resizing is None else repr(resizing)
            raise ValueError(f"resize: got {got}, expected {', '.join(RESIZINGS)}, for a learned table")
        name = f"{names_of(config.steps)[config.steps.index(positions)]}.weight"
        table = tensors[name]
        # The rows before the first position are padding; keep them.
        tensors[name] = np.concatenate(
            (table[: positions.first], RESIZINGS[resizing](table[positions.first :], max_len))
        )
    steps = config.steps
    if positions is not None and positions.rows and positions.table != "hybrid":
        longer = replace(positions, rows=max_len + positions.first)
        steps = tuple(longer if step is positions else step for step in steps)
    return FrontEndData(replace(config, steps=steps, max_len=max_len), tensors).check()
