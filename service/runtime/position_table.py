"""Position vectors as views of the data file.

Letters: B batch, L length, M max_len, P width of the table.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import DATA, MANIFEST, POSITION_EMBEDDINGS, POSITIONED_GRAPH, Manifest
from preblock.service.artifacts.records import PositionTable
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.runner import Feeds, Float32, Runner


class PositionedRunner:
    """Runs calls with one offset on `positioned.onnx`, and all others on another runner.

    The plain graph copies the rows of the table; `positioned.onnx` reads them in place.

    Args:
        positioned: runs `positioned.onnx`.
        positions: vectors of all positions, (1, M, P).
        plain: runs the plain graph.

    """

    def __init__(self, positioned: Runner, positions: Float32, plain: Runner) -> None:
        self._positioned, self._positions, self._plain = positioned, positions, plain

    def run(self, feeds: Feeds, outputs: Sequence[str]) -> dict[str, Float32]:
        """Return `outputs`: `embeddings` alone."""
        if len(feeds["offset"]) > 1:
            return self._plain.run(feeds, outputs)
        return self._positioned.run(with_position_view(feeds, self._positions), outputs)


def map_positions(folder: Path, manifest: Manifest) -> Float32:
    """Map the vectors of all positions for `positioned.onnx`, (1, M, P), from the data file in `folder`.

    Raises:
        ArtifactError: the manifest names no such graph and table, or the file does not hold the table.

    """
    inputs = manifest.graphs[POSITIONED_GRAPH].inputs
    widths = [tensor.shape[-1] for tensor in inputs if tensor.name == POSITION_EMBEDDINGS and len(tensor.shape) == 3]
    if manifest.positions is None or len(widths) != 1 or not isinstance(widths[0], int):
        message = f"{MANIFEST} positions: there is no table for {POSITIONED_GRAPH}"
        raise ArtifactError(
            f"{MANIFEST} positions", manifest.positions, f"a table for {POSITIONED_GRAPH}", message=message
        )
    return map_rows(folder, manifest, "positions", manifest.positions, widths[0])[None]


def map_rows(folder: Path, manifest: Manifest, field: str, table: PositionTable, width: int) -> Float32:
    """Map the rows of all positions, (M, width), of the manifest's `field`.

    Raises:
        ArtifactError: positions have no limit, or the data file does not hold the table.

    """
    if manifest.max_len is None:
        raise ArtifactError(f"{MANIFEST} max_len", None, f"a number, since there are {field}")
    size = 4 * width
    room = (manifest.files[DATA].bytes - table.begin) // size
    if table.rows > room or table.first + manifest.max_len > table.rows:
        allowed = f"{table.first + manifest.max_len} to {room}"
        raise ArtifactError(f"{MANIFEST} {field}.rows", table.rows, allowed)
    begin = table.begin + table.first * size
    return np.memmap(folder / DATA, np.float32, "r", begin, (manifest.max_len, width)).view(np.ndarray)


def with_position_view(feeds: Feeds, positions: Float32) -> dict[str, NDArray[Any]]:
    """Return the feeds of `positioned.onnx` from the plain graph's feeds with one offset."""
    given = dict(feeds)
    begin = int(given.pop("offset")[0])
    given[POSITION_EMBEDDINGS] = positions[:, begin : begin + given["input_ids"].shape[1]]
    return given
