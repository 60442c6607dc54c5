"""Writes the ONNX graph of a custom module."""

from pathlib import Path

import numpy as np

from preblock.export.graph import export_graph
from preblock.export.parity import allowed_ulp, difference, run_module
from preblock.export.progress import Report
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.service.artifacts.names import EMBEDDINGS
from preblock.service.runtime.session import Session


def export_custom(frontend: CustomFrontEnd, folder: Path, report: Report) -> None:
    """Write the graph of `frontend` (in evaluation mode) into `folder`.

    The first trace gives the module one offset for all rows, so that the graph reads each position once. A `flatten` or
    a `view` of these positions freezes their axis at one row. The second trace gives such a module an offset for each
    row.

    Raises:
        ExportError: the exporter cannot trace the module.

    """
    export_graph(frontend, folder, report)
    if not _takes_row_offsets(frontend, folder):
        frontend.row_offsets = True
        export_graph(frontend, folder, report)


def _takes_row_offsets(frontend: CustomFrontEnd, folder: Path) -> bool:
    """Return whether the graph in `folder` equals the module for rows at the first and at the last offset."""
    length = min(2, frontend.signature.rows)
    feeds = {
        "input_ids": np.zeros((3, length), np.int64),
        "offset": np.array([0, frontend.signature.rows - length, 0]),
    }
    session = Session(folder)
    if session.refusal(feeds):
        return False
    found = session.run(feeds, [EMBEDDINGS])[EMBEDDINGS]
    return difference(found, run_module(frontend, feeds, indices=False))[1] <= allowed_ulp(frontend)
