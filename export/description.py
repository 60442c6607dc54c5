"""The manifest of an artifact, and the metadata in its graphs."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from preblock import __version__
from preblock.export.external_data import read_initializers
from preblock.export.graph_builder import label
from preblock.export.outputs import OUTPUTS
from preblock.export.progress import Report, StepProgress
from preblock.export.source import LoadedSource
from preblock.export.table_formats import find_stored
from preblock.export.table_places import find_kernel, find_ngram_tables
from preblock.models.checkpoints.consumers import consumers_of, inputs_beside
from preblock.models.config import FrontEndConfig
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.signature import Signature, StemSignature
from preblock.models.serialization import to_document
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
    DATA,
    EMBEDDINGS,
    GRAPH,
    SOFT_PROMPTS,
    TOKEN_EMBEDDINGS,
    TOKENIZER,
    UNSCALED,
)


def describe_artifact(loaded: LoadedSource, folder: Path, report: Report) -> Manifest | StemManifest:
    """Return the manifest of the graphs and files in `folder`, hashes included."""
    signature, config = loaded.frontend.signature, getattr(loaded.frontend, "config", None)
    graphs = [name for name in OUTPUTS if (folder / name).is_file()]
    files = [name for name in (*graphs, DATA, TOKENIZER, SOFT_PROMPTS) if (folder / name).is_file()]
    hashing = StepProgress(report, "hashing", sum((folder / name).stat().st_size for name in files))
    common: dict[str, Any] = {
        "family": signature.family,
        "width": signature.width,
        "graphs": {name: describe_graph(folder / name) for name in graphs},
        "files": {name: describe(folder / name, hashing.sha256) for name in files},
        "source": loaded.record,
        "versions": {"preblock": __version__, "onnx": onnx.__version__},
    }
    if isinstance(signature, StemSignature):
        return _describe_stem(loaded, signature, common)
    steps = _describe_steps(loaded, config) if isinstance(config, FrontEndConfig) else {}
    if isinstance(config, FrontEndConfig):
        tables = _describe_tables(config, read_initializers(folder))
    else:
        from preblock.export.own_modules.kernel_tables import describe_kernel

        tables = {"dtype": "float32", "kernel": describe_kernel(folder, signature.max_len)}
        common["versions"] |= _torch_version()
    history = None
    if signature.reset_id is not None:
        history = History(tokens=signature.history, reset_id=signature.reset_id)
    if loaded.tables.tables:
        tables["ngram_tables"] = loaded.tables.tables
    return Manifest(
        vocab_size=signature.vocab_size,
        max_len=signature.max_len,
        indices=dict(signature.indices),
        needed=signature.needed,
        counts=signature.counts,
        padding_id=signature.padding_idx,
        refused_ids=signature.refused_ids,
        resized=loaded.resized,
        sentence=loaded.sentence,
        history=history,
        references=dict(loaded.tables.references),
        soft_prompts=dict(loaded.soft_prompts),
        **{"token_embeddings": None, "front_end": None, **steps},
        **tables,
        **common,
    )


def _describe_stem(loaded: LoadedSource, signature: StemSignature, common: dict[str, Any]) -> StemManifest:
    return StemManifest(
        dtype="float32",
        input=Tensor(name=signature.input, dtype="float32", shape=signature.shape),
        tokens=None if signature.patch_size else signature.rows,
        image_size=signature.image_size,
        patch_size=signature.patch_size,
        front_end=to_document(loaded.frontend.config),
        **common | {"versions": common["versions"] | _torch_version()},
    )


def _torch_version() -> dict[str, str]:
    """Return the version of torch, whose exporter traced a stem or a custom module."""
    return {"torch": version("torch")}


def _describe_tables(config: FrontEndConfig, tensors: Mapping[str, onnx.TensorProto]) -> dict[str, Any]:
    """Return the stored type and the places of the tables of a written graph."""
    format_ = find_stored(tensors)
    return {
        "dtype": format_.dtype if format_ else "float32",
        "scale": format_.scale if format_ else None,
        "block": format_.block if format_ else None,
        "kernel": find_kernel(config, tensors),
        "ngram_tables": find_ngram_tables(config, tensors),
    }


def _describe_steps(loaded: LoadedSource, config: FrontEndConfig) -> dict[str, Any]:
    """Return the fields of the manifest known only of a front-end built from steps."""
    signature = config.signature
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
        "ngram_hash": None if config.ngrams is None else _describe_hash(config.ngrams, config.tokens.rows),
        "front_end": config.to_document(),
        "first_row": config.positions.first if config.positions else 0,
    }


def _describe_hash(config: NgramConfig, vocab_size: int) -> NgramHash:
    rows = np.array(config.head_rows).reshape(len(config.layers), config.history, config.heads)
    return NgramHash.model_validate({"factors": config.multipliers(vocab_size), "rows": rows.tolist()})


def label_traced(folder: Path, signature: Signature | StemSignature) -> None:
    """Label the graph that the exporter of torch wrote into `folder`."""
    model = onnx.load(folder / GRAPH, load_external_data=False)
    label(model, GRAPH, OUTPUTS[GRAPH].title, signature)
    onnx.save(model, folder / GRAPH)


def describe_graph(graph: Path) -> Graph:
    """Return the inputs and outputs of the ONNX file `graph`."""
    model = onnx.load(graph, load_external_data=False)
    return Graph(inputs=tuple(map(_spec, model.graph.input)), outputs=tuple(map(_spec, model.graph.output)))


def _spec(node: onnx.ValueInfoProto) -> Tensor:
    tensor = node.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return Tensor(name=node.name, dtype=dtype, shape=tuple(d.dim_param or d.dim_value for d in tensor.shape.dim))
