"""The manifest of an artifact, and the metadata in its graphs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import torch

from preblock import __version__
from preblock.export.kernel_tables import describe_kernel
from preblock.export.ngram_tables import describe_tables
from preblock.export.progress import Report, StepProgress
from preblock.export.source import LoadedSource
from preblock.export.stored_tables import read_format
from preblock.models.checkpoints.consumers import consumers_of, inputs_beside
from preblock.models.frontend import FrontEnd
from preblock.models.modules import stems
from preblock.models.modules.signature import Signature, StemSignature
from preblock.models.modules.stems import Stem
from preblock.service.artifacts.io import describe
from preblock.service.artifacts.manifest import (
    Consumer,
    Graph,
    History,
    Manifest,
    NgramHash,
    Rotary,
    StemManifest,
    Tensor,
    TokenEmbeddings,
)
from preblock.service.artifacts.names import (
    BIAS_GRAPH,
    DATA,
    EMBEDDINGS,
    EMBEDDINGS_GRAPH,
    GRAPH,
    LAYER_INPUTS_GRAPH,
    LAYER_TOKENS_GRAPH,
    NGRAM_IDS_GRAPH,
    NGRAM_ROWS_GRAPH,
    NGRAMS_GRAPH,
    SOFT_PROMPTS,
    TOKEN_EMBEDDINGS,
    TOKEN_GRAPH,
    TOKENIZER,
    UNSCALED,
    UNSCALED_GRAPH,
)

UNCHECKED = "It checks no index and no length: a negative index wraps, and a GPU may answer zeros to one too large."
GRAPHS = {
    GRAPH: f"The vectors that enter block 0 of a transformer, and what its attention is given. {UNCHECKED}",
    EMBEDDINGS_GRAPH: f"The vectors that enter block 0 of a transformer, alone. {UNCHECKED}",
    TOKEN_GRAPH: f"The vectors of a transformer's own lookup, before positions and norm. {UNCHECKED}",
    UNSCALED_GRAPH: f"The rows of a transformer's token table, without its embedding scale. {UNCHECKED}",
    LAYER_TOKENS_GRAPH: f"The token part of the inputs of all layers of a transformer. {UNCHECKED}",
    LAYER_INPUTS_GRAPH: f"The inputs of all layers of a transformer, besides its hidden states. {UNCHECKED}",
    NGRAMS_GRAPH: f"The n-gram embeddings of some layers of a transformer, from the last ids. {UNCHECKED}",
    NGRAM_IDS_GRAPH: f"The rows of n-gram tables for some layers of a transformer, from the last ids. {UNCHECKED}",
    NGRAM_ROWS_GRAPH: f"The n-gram embeddings of some layers of a transformer, from the rows. {UNCHECKED}",
    BIAS_GRAPH: "What attention adds for the distance between a query and a key.",
}
"""The graphs of an artifact, and the description in the metadata of each."""


def describe_artifact(loaded: LoadedSource, folder: Path, report: Report) -> Manifest | StemManifest:
    """Return the manifest of the graphs and files in `folder`, hashes included."""
    frontend = loaded.frontend
    graphs = [name for name in GRAPHS if (folder / name).is_file()]
    files = [name for name in (*graphs, DATA, TOKENIZER, SOFT_PROMPTS) if (folder / name).is_file()]
    hashing = StepProgress(report, "hashing", sum((folder / name).stat().st_size for name in files))
    common: dict[str, Any] = {
        "family": frontend.signature.family,
        "width": frontend.signature.width,
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
    signature, format_ = frontend.signature, read_format(folder)
    steps = _describe_steps(loaded, frontend) if isinstance(frontend, FrontEnd) else {}
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
        kernel=describe_kernel(folder, signature.max_len),
        resized=loaded.resized,
        sentence=loaded.sentence,
        history=_describe_history(signature),
        ngram_tables=loaded.tables.tables or describe_tables(folder),
        references=dict(loaded.tables.references),
        soft_prompts=dict(loaded.soft_prompts),
        **{"token_embeddings": None, "front_end": None, **steps},
        **common,
    )


def _describe_history(signature: Signature) -> History | None:
    return None if signature.reset_id is None else History(tokens=signature.history, reset_id=signature.reset_id)


def _describe_steps(loaded: LoadedSource, frontend: FrontEnd) -> dict[str, Any]:
    """Return the fields of the manifest known only of a front-end built from steps."""
    signature, config = frontend.signature, frontend.config
    outputs = {
        "applied": TOKEN_EMBEDDINGS if config.scaled_lookup else EMBEDDINGS if config.only_looks_up else None,
        "none": UNSCALED if config.scaled_lookup else TOKEN_EMBEDDINGS,
    }
    return {
        "token_embeddings": TokenEmbeddings(
            output=EMBEDDINGS if signature.lookup_width is None else TOKEN_EMBEDDINGS,
            width=signature.lookup_width or signature.width,
            embedding_scale=config.embedding_scale,
            scaled=config.scaled_lookup,
            consumers=tuple(
                Consumer(output=outputs[reading.scale], **asdict(reading))
                for reading in consumers_of(config, loaded.record.discovered_with)
            ),
            beside=inputs_beside(config) or loaded.beside,
        ),
        "rotary": tuple(
            Rotary(
                cos=output.names[0],
                sin=output.names[1],
                form=output.form,
                dtype=output.dtype,
                width=output.config.dim,
                layout=output.layout,
                axes=output.axes,
                max_len=output.config.length or None,
            )
            for output in config.rotary
        ),
        "ngram_hash": _describe_hash(frontend),
        "front_end": config.to_document(),
        "first_row": config.positions.first if config.positions else 0,
    }


def _describe_hash(frontend: FrontEnd) -> NgramHash | None:
    if frontend.config.ngrams is None:
        return None
    return NgramHash(factors=frontend.ngrams.factors.tolist(), rows=frontend.ngrams.rows.tolist())


def label_graphs(folder: Path, signature: Signature | StemSignature) -> None:
    """Write producer, name, description and limits into every graph in `folder`, for use without its manifest.

    Equal front-ends get equal metadata: no path, no time, nothing of this machine.
    """
    properties = {
        f"preblock.{name}": str(value)
        for name in ("family", "vocab_size", "max_len", "image_size", "patch_size")
        if (value := getattr(signature, name, None)) is not None
    }
    indices = signature.indices if isinstance(signature, Signature) else {}
    properties |= {f"preblock.indices.{name}": str(count) for name, count in indices.items()}
    for name, description in GRAPHS.items():
        if (folder / name).is_file():
            model = onnx.load(folder / name, load_external_data=False)
            model.producer_name, model.producer_version = "preblock", __version__
            model.doc_string = description
            model.graph.name = Path(name).stem
            onnx.helper.set_model_props(model, properties)
            onnx.save(model, folder / name)


def describe_graph(graph: Path) -> Graph:
    """Return the inputs and outputs of the ONNX file `graph`."""
    model = onnx.load(graph, load_external_data=False)
    return Graph(inputs=tuple(map(_spec, model.graph.input)), outputs=tuple(map(_spec, model.graph.output)))


def _spec(node: onnx.ValueInfoProto) -> Tensor:
    tensor = node.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return Tensor(name=node.name, dtype=dtype, shape=tuple(d.dim_param or d.dim_value for d in tensor.shape.dim))
