"""Metadata in the graphs of an artifact, for use without its manifest.

Equal front-ends get equal metadata: no path, no time, nothing of this machine.
"""

from pathlib import Path

import onnx

from preblock import __version__
from preblock.models.modules.signature import Signature, StemSignature
from preblock.service.artifacts.manifest import BIAS_GRAPH, EMBEDDINGS_GRAPH, GRAPH, POSITIONED_GRAPH, TOKEN_GRAPH

UNCHECKED = "It checks no index and no length: a negative index wraps, and a GPU may answer zeros to one too large."
DESCRIPTIONS = {
    GRAPH: f"The vectors that enter block 0 of a transformer, and what its attention is given. {UNCHECKED}",
    EMBEDDINGS_GRAPH: f"The vectors that enter block 0 of a transformer, alone. {UNCHECKED}",
    POSITIONED_GRAPH: (
        "The vectors that enter block 0 of a transformer, alone, from ids and the vectors of their "
        f"positions. {UNCHECKED}"
    ),
    TOKEN_GRAPH: f"The vectors of a transformer's own lookup, before positions and norm. {UNCHECKED}",
    BIAS_GRAPH: "What attention adds for the distance between a query and a key.",
}


def label_graphs(folder: Path, signature: Signature | StemSignature) -> None:
    """Write producer, name, description and limits into every graph in `folder`."""
    properties = {
        f"preblock.{name}": str(value)
        for name in ("family", "vocab_size", "max_len", "image_size", "patch_size")
        if (value := getattr(signature, name, None)) is not None
    }
    indices = signature.indices if isinstance(signature, Signature) else {}
    properties |= {f"preblock.indices.{name}": str(count) for name, count in indices.items()}
    for name, description in DESCRIPTIONS.items():
        if (folder / name).is_file():
            model = onnx.load(folder / name, load_external_data=False)
            model.producer_name, model.producer_version = "preblock", __version__
            model.doc_string = description
            model.graph.name = Path(name).stem
            onnx.helper.set_model_props(model, properties)
            onnx.save(model, folder / name)
