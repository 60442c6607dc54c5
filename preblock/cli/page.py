"""The page of an artifact for a person: sizes, limits, outputs, parameters, memory, parity, files."""

from collections.abc import Iterator
from pathlib import Path

from preblock.cli.options import FoundArtifact, table
from preblock.export.progress import format_bytes
from preblock.service.artifacts.graphs import count_parameters
from preblock.service.artifacts.manifest import Manifest, StemManifest
from preblock.service.artifacts.names import (
    DATA,
    EMBEDDINGS,
    MANIFEST,
    NGRAMS,
    PARITY,
    PER_LAYER,
    PER_LAYER_TOKENS,
    TOKEN_EMBEDDINGS,
    UNSCALED,
)
from preblock.service.artifacts.parity import ParityReport
from preblock.service.artifacts.references import describe_check

Section = list[tuple[str, str]]
"""Names and values of a part of the page."""


def write_page(artifact: FoundArtifact, manifest: Manifest | StemManifest, identity: str, report: ParityReport) -> str:
    """Return the page of an artifact."""
    sections: dict[str, Section] = {
        "": list(_identify(artifact, manifest, identity)),
        "Inputs": list(_inputs(manifest)),
        "Outputs": list(_outputs(manifest)),
        "Weights": list(_weights(artifact.folder, manifest, report)),
        "Parity with a reference": list(_parity(manifest, report)),
        "Files": list(_files(artifact.folder, manifest)),
    }
    if report.tokenizer:
        sections["Conflicts of the tokenizer"] = [(each.setting, each.details()) for each in report.tokenizer]
    lines = [f"{artifact.name} version {artifact.version}"]
    for title, rows in sections.items():
        lines += ["", title] if title else []
        lines += [f"  {line}" for line in table(rows).splitlines()]
    return "\n".join(lines)


def _identify(artifact: FoundArtifact, manifest: Manifest | StemManifest, identity: str) -> Iterator[tuple[str, str]]:
    source = manifest.source
    origin = " ".join(part for part in (source.kind, source.name, source.revision and f"at {source.revision}") if part)
    origin += ": random weights" if source.has_random_weights else ""
    yield "family", manifest.family
    yield "source", origin
    yield "folder", str(artifact.folder)
    yield "identity", identity
    yield "exported with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())


def _inputs(manifest: Manifest | StemManifest) -> Iterator[tuple[str, str]]:
    if isinstance(manifest, StemManifest):
        yield manifest.input.name, f"{manifest.input.dtype} {_shape(manifest.input.shape)}"
        return
    yield "input_ids", f"0 to {manifest.vocab_size - 1}"
    for name, count in manifest.indices.items():
        yield name, f"0 to {count - 1}, {'required' if name in manifest.needed else 'default 0'}"
    if manifest.refused_ids:
        yield "unsupported ids", ", ".join(map(str, manifest.refused_ids))
    if manifest.history is not None:
        start = f"id {manifest.history.reset_id} for a new row"
        yield "context", f"{manifest.history.tokens} ids before each row, for {NGRAMS}; {start}"
    limit = f"at most {manifest.max_len:,}" if manifest.max_len else "no limit"
    resized = manifest.resized
    if resized is not None:
        method = f" ({resized.method})" if resized.method else ""
        limit += f", resized from {resized.from_max_len}{method}"
    yield "offset + tokens", limit
    if manifest.counts != "slots":
        counted = "attention_mask 1" if manifest.counts == "mask" else f"another id than {manifest.padding_id}"
        yield "positions count", f"tokens with {counted}"


def _outputs(manifest: Manifest | StemManifest) -> Iterator[tuple[str, str]]:
    """Yield each output with its shape and its consumer."""
    shapes = {tensor.name: tensor.shape for graph in manifest.graphs.values() for tensor in graph.outputs}
    if isinstance(manifest, StemManifest):
        yield EMBEDDINGS, f"{_shape(shapes[EMBEDDINGS])}: the input of block 0"
        return
    lookup = manifest.token_embeddings
    block = f"{_shape(shapes[EMBEDDINGS])}: the input of block 0{_describe_streams(manifest)}"
    scale = lookup.embedding_scale if lookup else 1
    scaled = "" if lookup is None or scale == 1 else f"; {'with' if lookup.scaled else 'without'} the scale {scale:g}"
    if lookup is None:
        yield EMBEDDINGS, block
    elif lookup.output == EMBEDDINGS:
        yield EMBEDDINGS, f"{block}; also {lookup.use}{scaled}"
    else:
        yield EMBEDDINGS, f"{block}; not inputs_embeds: the model would apply its front-end twice"
        yield TOKEN_EMBEDDINGS, f"{_shape(shapes[TOKEN_EMBEDDINGS])}: {lookup.use}{scaled}"
    if UNSCALED in shapes:
        yield UNSCALED, f"{_shape(shapes[UNSCALED])}: the same without the scale"
    layers = {
        PER_LAYER_TOKENS: "the token part of the inputs of all layers, per_layer_inputs of transformers",
        PER_LAYER: "the inputs of all layers",
        NGRAMS: "n-gram embeddings of some layers, with the ids before each row as context",
    }
    for name, use in layers.items():
        if name in shapes:
            yield name, f"{_shape(shapes[name])}: {use}"
    for rotary in manifest.rotary:
        form = "" if rotary.form == "full" else f", form {rotary.form}"
        form += "" if rotary.dtype == "float32" else f", {rotary.dtype} in the graph"
        for name in dict.fromkeys((rotary.cos, rotary.sin)):
            use = "rotation of queries and keys in attention"
            yield name, f"{_shape(shapes[name])}: {use}, layout {rotary.layout}{form}"
    if manifest.bias:
        yield manifest.bias.name, f"{_shape(manifest.bias.shape)}: added in attention, from /bias"


def _describe_streams(manifest: Manifest) -> str:
    front_end = manifest.front_end or {}
    streams, copies = front_end.get("streams", 1), front_end.get("copies", 1)
    if copies != 1:
        return f", which takes each vector {copies} times"
    return f", the first of its {streams} streams" if streams != 1 else ""


def _weights(folder: Path, manifest: Manifest | StemManifest, report: ParityReport) -> Iterator[tuple[str, str]]:
    counts = count_parameters(folder, manifest, report)
    dtype = manifest.stored_as if isinstance(manifest, Manifest) else manifest.dtype
    yield "parameters", f"{sum(counts.values()):,}"
    for name, count in counts.items():
        yield f"  {name}", f"{count:,}"
    yield "stored as", dtype
    if isinstance(manifest, Manifest) and manifest.references:
        size = format_bytes(sum(reference.bytes for reference in manifest.references.values()))
        checked = "whole files" if describe_check(manifest, report) == "content" else "headers, not yet by verify"
        yield "referenced", f"{len(manifest.references)} files, {size}; checked: {checked}"
    memory = format_bytes(manifest.files[DATA].bytes)
    yield "memory", f"{memory}, on a CPU mapped from the file and shared by all workers"


def _parity(manifest: Manifest | StemManifest, report: ParityReport) -> Iterator[tuple[str, str]]:
    for provider, parity in report.providers.items():
        yield f"reference on {provider}", parity.reference
        for output, compared in parity.outputs.items():
            yield f"{output} on {provider}", compared.summary()
    if report.storage:
        yield (
            f"tables stored as {manifest.stored_as if isinstance(manifest, Manifest) else manifest.dtype}",
            report.storage_summary(),
        )
    for name, stored in report.storage.items():
        yield f"  {name}", stored.summary()


def _files(folder: Path, manifest: Manifest | StemManifest) -> Iterator[tuple[str, str]]:
    for name in (*manifest.files, MANIFEST, PARITY):
        yield name, format_bytes((folder / name).stat().st_size)
    if isinstance(manifest, Manifest):
        for path, reference in manifest.references.items():
            yield path, f"{format_bytes(reference.bytes)}, referenced"


def _shape(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
