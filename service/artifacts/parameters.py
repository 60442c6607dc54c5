"""Trained parameters of an artifact, counted from its graphs."""

import math
from pathlib import Path

from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.onnx_check import MAX_GRAPH_BYTES, TYPES, parse
from preblock.service.artifacts.parity import ParityReport
from preblock.service.core.files import read_file

WEIGHT_TYPES = ("float32", "float16", "bfloat16", "int8", "uint8")
"""Types of stored weights."""


def count_parameters(folder: Path, manifest: Manifest | StemManifest, report: ParityReport) -> dict[str, int]:
    """Return the number of trained values of each weight, read from the graphs; computed tables are not trained."""
    counts = {}
    for graph in manifest.graphs:
        for tensor in parse(graph, read_file(folder / graph, MAX_GRAPH_BYTES)).graph.initializer:
            dtype = TYPES[tensor.data_type][0]
            # Without a front-end of steps the names are free.
            trained = tensor.name.endswith(("weight", "bias")) or manifest.kind == "stem" or manifest.front_end is None
            if tensor.dims and dtype in WEIGHT_TYPES and trained:
                counts[tensor.name] = math.prod(tensor.dims)
    if isinstance(manifest, Manifest) and manifest.references:
        counts |= {f"ngrams.tables.{n}.weight": t.rows * t.width for n, t in enumerate(manifest.ngram_tables)}
    # The rows of an int4 table are packed and padded.
    return counts | {name: table.rows * table.width for name, table in report.storage.items()}
