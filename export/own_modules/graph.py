"""Writes the ONNX graph of somebody's own module: dynamic axes, one external data file.

Letters: B batch, L length, D output width.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from preblock.export.graph_builder import save_graph
from preblock.export.own_modules.tracing import export_program
from preblock.export.parity import allowed_ulp, difference
from preblock.export.progress import Report
from preblock.export.torch_reference import TorchReference
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.service.artifacts.names import EMBEDDINGS, GRAPH
from preblock.service.runtime.session import Session


def export_custom(frontend: CustomFrontEnd, folder: Path, report: Report) -> None:
    """Write the graph of `frontend` (in evaluation mode) into `folder`.

    `model.onnx` has int64 inputs `input_ids` (batch, length) and `offset` (1,) or (batch,), and the float32 output
    `embeddings` (batch, length, D).

    The first trace gives the module one offset for all rows, so that the graph reads each position once. A `flatten` or
    a `view` of these positions freezes their axis at one row. The second trace gives such a module an offset for each
    row.

    Raises:
        ExportError: the exporter cannot trace the module.

    """
    _trace(frontend, folder, report)
    if not _takes_row_offsets(frontend, folder):
        frontend.row_offsets = True
        _trace(frontend, folder, report)


def _trace(frontend: CustomFrontEnd, folder: Path, report: Report) -> None:
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    # `offset` has one element, so that (1,) broadcasts over the batch in the graph; other sizes are arbitrary.
    samples: dict[str, Any] = {
        "input_ids": torch.ones((2, 3), dtype=torch.int64),
        "offset": torch.ones(1, dtype=torch.int64),
    }
    model = export_program(
        frontend,
        folder,
        report,
        kwargs=samples,
        dynamic_shapes={"input_ids": axes, "offset": None},
        input_names=["input_ids", "offset"],
        output_names=[EMBEDDINGS],
    )
    del model.graph.value_info[:]  # shapes inferred for one offset
    offset = next(node for node in model.graph.input if node.name == "offset")
    offset.type.tensor_type.shape.dim[0].dim_param = "offsets"  # (1,) or (batch,)
    save_graph(model, folder / GRAPH)


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
    reference = TorchReference(frontend)
    return difference(found, reference.vectors(feeds))[1] <= allowed_ulp(reference)
