"""The manifest of an artifact, from its front-end and its files."""

from pathlib import Path
from typing import Any

import onnx
import torch

from preblock import __version__
from preblock.export.graph import describe_graph
from preblock.export.kernel import kernel_of
from preblock.export.position_inputs import positions_of
from preblock.export.progress import Report, StepProgress
from preblock.export.source import LoadedSource
from preblock.export.stored_tables import read_format
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.models.frontend import FrontEnd
from preblock.models.modules import stems
from preblock.models.modules.stems import Stem
from preblock.service.artifacts.io import describe
from preblock.service.artifacts.manifest import (
    BIAS_GRAPH,
    DATA,
    EMBEDDINGS,
    POSITIONED_GRAPH,
    TOKEN_EMBEDDINGS,
    TOKEN_GRAPHS,
    TOKENIZER,
    Manifest,
    StemManifest,
)
from preblock.service.artifacts.records import Rotary, Tensor, TokenEmbeddings


def describe_artifact(loaded: LoadedSource, folder: Path, report: Report) -> Manifest | StemManifest:
    """Return the manifest of the graphs and files in `folder`, hashes included."""
    frontend, signature = loaded.frontend, loaded.frontend.signature
    graphs = [name for name in (*TOKEN_GRAPHS, POSITIONED_GRAPH, BIAS_GRAPH) if (folder / name).is_file()]
    files = [name for name in (*graphs, DATA, TOKENIZER) if (folder / name).is_file()]
    hashing = StepProgress(report, "hashing", sum((folder / name).stat().st_size for name in files))
    common: dict[str, Any] = {
        "family": signature.family,
        "width": signature.width,
        "graphs": {name: describe_graph(folder / name) for name in graphs},
        "files": {name: describe(folder / name, hashing.sha256) for name in files},
        "source": loaded.record,
        "versions": {"preblock": __version__, "onnx": onnx.__version__, "torch": torch.__version__},
    }
    if isinstance(frontend, Stem):
        own = frontend.signature
        return StemManifest(
            dtype="float32",
            input=Tensor(name=own.input, dtype="float32", shape=own.shape),
            tokens=None if own.patch_size else own.rows,
            image_size=own.image_size,
            patch_size=own.patch_size,
            front_end=stems.to_document(frontend.config),
            **common,
        )
    return _describe_tokens(loaded, frontend, folder, common)


def _describe_tokens(
    loaded: LoadedSource, frontend: FrontEnd | CustomFrontEnd, folder: Path, common: dict[str, Any]
) -> Manifest:
    known, signature, format_ = isinstance(frontend, FrontEnd), frontend.signature, read_format(folder)
    return Manifest(
        dtype=format_.dtype if format_ else "float32",
        scale=format_.scale if format_ else None,
        block=format_.block if format_ else None,
        vocab_size=signature.vocab_size,
        max_len=signature.max_len,
        indices=dict(signature.indices),
        needed=signature.needed,
        counts=signature.counts,
        padding_id=signature.padding_idx,
        refused_ids=signature.refused_ids,
        token_embeddings=TokenEmbeddings(
            output=EMBEDDINGS if signature.lookup_width is None else TOKEN_EMBEDDINGS,
            width=signature.lookup_width or signature.width,
            consumer_scales=signature.consumer_scales,
        )
        if known
        else None,
        rotary=tuple(
            Rotary(
                cos=output.named("rotary_cos"),
                sin=output.named("rotary_sin"),
                width=output.config.dim,
                layout=output.layout,
                max_len=output.config.length or None,
            )
            for output in (frontend.config.rotary if isinstance(frontend, FrontEnd) else ())
        ),
        kernel=kernel_of(folder) if POSITIONED_GRAPH in common["graphs"] else None,
        positions=positions_of(folder) if POSITIONED_GRAPH in common["graphs"] else None,
        resized=loaded.resized,
        front_end=frontend.config.to_document() if isinstance(frontend, FrontEnd) else None,
        **common,
    )
