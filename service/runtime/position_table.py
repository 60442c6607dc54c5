"""Vectors of positions as views of the data file, for the graph that is given them.

Letters: B batch, L length, P width of the table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import DATA, MANIFEST, POSITION_EMBEDDINGS, POSITIONED_GRAPH, Manifest
from preblock.service.core.errors import ArtifactError

Float32 = NDArray[np.float32]


def map_positions(folder: Path, manifest: Manifest) -> Float32:
    """Return the vectors of all positions, (1, max_len, P), which stay in the data file of the artifact in `folder`.

    Raises:
        ArtifactError: the manifest names no such graph and table, or a table that the file does not hold.

    """
    table, inputs = manifest.positions, manifest.graphs[POSITIONED_GRAPH].inputs
    widths = [tensor.shape[-1] for tensor in inputs if tensor.name == POSITION_EMBEDDINGS and len(tensor.shape) == 3]
    if table is None or manifest.max_len is None or len(widths) != 1 or not isinstance(widths[0], int):
        raise ArtifactError(f"{MANIFEST} positions", table, f"what {POSITIONED_GRAPH} is given")
    size = 4 * widths[0]
    room = (manifest.files[DATA].bytes - table.begin) // size
    if table.rows > room or table.first + manifest.max_len > table.rows:
        allowed = f"{table.first + manifest.max_len} to {room}"
        raise ArtifactError(f"{MANIFEST} positions.rows", table.rows, allowed)
    begin, shape = table.begin + table.first * size, (1, manifest.max_len, widths[0])
    return np.memmap(folder / DATA, np.float32, "r", begin, shape).view(np.ndarray)


def place(feeds: Mapping[str, NDArray[Any]], positions: Float32) -> dict[str, NDArray[Any]]:
    """Return the feeds of the graph that is given positions, for those of the plain graph with one offset."""
    given = dict(feeds)
    begin = int(given.pop("offset")[0])
    given[POSITION_EMBEDDINGS] = positions[:, begin : begin + given["input_ids"].shape[1]]
    return given
