"""Rows of positions, computed by the nodes of a model's own graph.

Letters: L length, P width of a row of positions.
"""

from pathlib import Path

import numpy as np

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.position_graph import build_position_graph
from preblock.service.runtime.chunks import CHUNK_VALUES
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.runner import Float32
from preblock.service.runtime.session import Session


class PositionRows:
    """Computes the vectors that a model adds for its positions, on the CPU.

    Args:
        session: runs the graph of `build_position_graph`.
        manifest: of the model.

    """

    def __init__(self, session: Session, manifest: Manifest) -> None:
        self._session = session
        self._real_id = int(manifest.padding_id == 0)
        """An id other than padding, which has no position."""
        self.width: int = self._compute(0, 1).shape[1]
        """P."""

    def compute(self, first: int, count: int) -> Float32:
        """Return the rows of the positions `first` to `first + count - 1`, float32 (count, P), of validated numbers.

        They are computed in chunks, because onnxruntime keeps the memory of its largest run.
        """
        rows, most = np.empty((count, self.width), np.float32), max(1, CHUNK_VALUES // self.width)
        for begin in range(0, count, most):
            end = min(begin + most, count)
            rows[begin:end] = self._compute(first + begin, end - begin)
        return rows

    def _compute(self, first: int, count: int) -> Float32:
        feeds = {tensor.name: np.zeros((1, count), np.int64) for tensor in self._session.inputs}
        feeds["input_ids"][:] = self._real_id
        if "attention_mask" in feeds:
            feeds["attention_mask"][:] = 1
        feeds["offset"] = np.array([first])
        (rows,) = self._session.run(feeds).values()
        return rows.reshape(count, -1)


def open_position_rows(folder: Path, manifest: Manifest) -> PositionRows | None:
    """Open the position rows of the artifact in `folder`; None if its graph adds no positions to the token rows.

    The additions of a custom module have no known meaning: None, too.

    Raises:
        ArtifactError: onnxruntime cannot load the graph.

    """
    content = None if manifest.front_end is None else build_position_graph(folder, manifest)
    if content is None:
        return None
    return PositionRows(Session(folder, CPU, 1, manifest.plain, content=content), manifest)
