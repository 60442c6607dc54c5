"""Loads an artifact: checks it, opens its graphs, and runs each once."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.checksums import Checksums
from preblock.service.artifacts.io import check_files, read, read_with_identity
from preblock.service.artifacts.manifest import (
    CONTEXT,
    EMBEDDINGS,
    GRAPH,
    MANIFEST,
    NGRAM_IDS_GRAPH,
    NGRAM_ROWS_GRAPH,
    NGRAMS_GRAPH,
    OUTPUT_GRAPHS,
    PARITY,
    POSITION_EMBEDDINGS,
    POSITIONED_GRAPH,
    TOKEN_EMBEDDINGS,
    TOKEN_GRAPHS,
    TOKENIZER,
    Manifest,
    StemManifest,
)
from preblock.service.artifacts.ngram_check import check_ngram_tables
from preblock.service.artifacts.onnx_check import check_graphs
from preblock.service.artifacts.parity import ParityReport
from preblock.service.artifacts.records import Tensor
from preblock.service.artifacts.references import check_references, read_signatures
from preblock.service.core.errors import ArtifactError, Unavailable
from preblock.service.core.files import signature_of
from preblock.service.runtime.cuda_embedding import CudaLookup
from preblock.service.runtime.fused_embedding import BUILT, FusedLookup, map_tables
from preblock.service.runtime.lookup_table import map_lookup
from preblock.service.runtime.model import EncoderStem, ServedModel, TokenModel
from preblock.service.runtime.ngram_ids import open_ngram_ids
from preblock.service.runtime.ngram_rows import open_ngram_rows
from preblock.service.runtime.position_rows import open_position_rows
from preblock.service.runtime.position_table import PositionedRunner, map_positions
from preblock.service.runtime.providers import CPU, ProviderChoice
from preblock.service.runtime.runner import Float32, Runner
from preblock.service.runtime.session import Session, open_session
from preblock.service.runtime.soft_prompts import map_soft_prompts
from preblock.service.runtime.table_memory import TableMemory
from preblock.service.runtime.table_warm_up import warm_up
from preblock.service.runtime.tokenizer import Tokenizer


def load_model(
    name: str,
    version: int,
    folder: Path,
    checksums: Checksums,
    choice: ProviderChoice,
    threads: int,
    gpu_mem_limit_bytes: int | None,
    memory: TableMemory,
    reference_roots: Sequence[Path] = (),
) -> ServedModel:
    """Check the artifact in `folder`, open its graphs, and run each once.

    Args:
        name: of the model.
        version: of the model.
        folder: the artifact.
        checksums: hashes that earlier runs computed.
        choice: the provider, by model.
        threads: of one call.
        gpu_mem_limit_bytes: GPU memory limit of one graph; None: no limit.
        memory: of the n-gram tables of all models.
        reference_roots: folders of files outside the artifact; default: none allowed.

    Raises:
        ArtifactError: the artifact is broken, or its files contradict each other.

    """
    manifest, identity = read_with_identity(folder)
    parity = read(ParityReport, folder / PARITY)
    if GRAPH not in manifest.graphs:
        raise ArtifactError(f"{MANIFEST} graphs", ", ".join(manifest.graphs) or "nothing", f"at least {GRAPH}")
    signatures = check_files(folder, manifest, checksums.sha256)
    check_graphs(folder, manifest)
    check_ngram_tables(folder, manifest)
    references = check_references(manifest, reference_roots)
    provider = choice.for_model(manifest).active
    sessions = _open_sessions(folder, manifest, provider, threads, gpu_mem_limit_bytes)
    for graph, session in sessions.items():
        declared = manifest.graphs[graph]
        _compare(graph, "inputs", declared.inputs, session.inputs)
        _compare(graph, "outputs", declared.outputs, session.outputs)
    _check_widths(manifest)
    if isinstance(manifest, StemManifest):
        _compare(GRAPH, "inputs", (manifest.input,), sessions[GRAPH].inputs)
    else:
        _check_history(manifest)
        _check_inputs(manifest)
        for graph in filter(sessions.__contains__, TOKEN_GRAPHS):
            _check_table_rows(graph, manifest, sessions[graph] if provider == CPU else Session(folder, CPU, 1, graph))
    positions = tables = gpu_lookup = lookup_table = None
    if isinstance(manifest, Manifest) and POSITIONED_GRAPH in sessions:
        positions = map_positions(folder, manifest)
        _check_positioned(manifest, sessions, positions)
    if isinstance(manifest, Manifest) and manifest.kernel is not None:
        tables = map_tables(folder, manifest, manifest.kernel)
        if provider != CPU:
            gpu_lookup, tables = CudaLookup(tables, gpu_mem_limit_bytes), None
            _check_kernel(manifest, sessions, gpu_lookup)
        elif BUILT:
            _check_kernel(manifest, sessions, FusedLookup(tables, sessions[manifest.plain]))
    if isinstance(manifest, Manifest) and provider == CPU:
        lookup_table = map_lookup(folder, manifest)
    for session in sessions.values():
        session.warm_up({tensor.name: _smallest_input(tensor, manifest) for tensor in session.inputs})
    for file, signature in signatures.items():
        if signature_of(os.lstat(folder / file)) != signature:
            message = f"{file} changed while it was opened"
            raise ArtifactError(file, "a change while it was opened", "the checked file", message=message)
    if read_signatures(references) != references:
        message = f"{MANIFEST} references: a file changed while it was opened"
        raise ArtifactError(f"{MANIFEST} references", "a changed file", "the checked file", message=message)
    served: dict[str, Any] = {
        "name": name,
        "version": version,
        "identity": identity,
        "parity": parity,
        "provider": provider,
        "sessions": sessions,
        "created": int((folder / MANIFEST).stat().st_mtime),
    }
    if isinstance(manifest, StemManifest):
        return EncoderStem(manifest=manifest, **served)
    ngrams = None
    if manifest.ngram_tables:
        ids = open_ngram_ids(manifest, sessions[NGRAM_IDS_GRAPH])
        ngrams = open_ngram_rows(folder, manifest, ids, memory, references)
        warm_up(f"model {name} version {version}", ngrams, manifest, memory)
    tokenizer = Tokenizer(folder / TOKENIZER, manifest.files[TOKENIZER]) if TOKENIZER in manifest.files else None
    tables = tables if BUILT else None
    open_rows = partial(open_position_rows, folder, manifest)
    return TokenModel(
        manifest=manifest,
        tokenizer=tokenizer,
        positions=positions,
        tables=tables,
        gpu_lookup=gpu_lookup,
        lookup_table=lookup_table,
        ngrams=ngrams,
        soft_prompts=map_soft_prompts(folder, manifest),
        open_rows=open_rows,
        **served,
    )


def _open_sessions(
    folder: Path, manifest: Manifest | StemManifest, provider: str, threads: int, gpu_mem_limit_bytes: int | None
) -> dict[str, Session]:
    """Open the graphs that the service runs."""
    tables = isinstance(manifest, Manifest) and bool(manifest.ngram_tables)
    # A GPU has the position vectors in its own memory. N-gram tables are too large for it: the CPU gathers their rows.
    left_out = {NGRAM_ROWS_GRAPH}  # for other runtimes
    on_cpu = {NGRAM_IDS_GRAPH} if tables else set()
    if provider != CPU:
        left_out |= {POSITIONED_GRAPH, *([NGRAMS_GRAPH] if tables else [])}
        if isinstance(manifest, Manifest) and manifest.kernel is not None:
            plain = manifest.graphs[manifest.plain]
            if [tensor.name for tensor in plain.outputs] == [EMBEDDINGS]:
                on_cpu.add(manifest.plain)  # a GPU runs the kernel in its place
    return {
        graph: open_session(folder, CPU if graph in on_cpu else provider, threads, graph, gpu_mem_limit_bytes)
        for graph in manifest.graphs
        if graph not in left_out
    }


def _smallest_input(tensor: Tensor, manifest: Manifest | StemManifest) -> NDArray[Any]:
    """Return the smallest legal input: every free dimension is 1, or one patch of an image."""
    one = manifest.patch_size or 1 if isinstance(manifest, StemManifest) else 1
    shape = [size if isinstance(size, int) else one if axis > 1 else 1 for axis, size in enumerate(tensor.shape)]
    return np.zeros(shape, tensor.dtype)


def _check_widths(manifest: Manifest | StemManifest) -> None:
    """Compare the widths of outputs with the manifest."""
    graphs = [manifest.graphs[graph] for graph in TOKEN_GRAPHS if graph in manifest.graphs]
    widths = {tensor.name: (None, *tensor.shape)[-1] for graph in graphs for tensor in graph.outputs}
    for name, width in widths.items():
        if not isinstance(width, int):
            raise ArtifactError(f"{MANIFEST} graphs {name}", width, "an output with a number as its last dimension")
    declared = {"width": (manifest.width, EMBEDDINGS)}
    if isinstance(manifest, Manifest) and manifest.token_embeddings:
        lookup = manifest.token_embeddings
        declared[f"{TOKEN_EMBEDDINGS}.width"] = (lookup.width, lookup.output)
    for field, (width, output) in declared.items():
        if width != widths.get(output):
            raise ArtifactError(f"{MANIFEST} {field}", width, f"{widths.get(output)}, the width of {output}")


def _check_inputs(manifest: Manifest) -> None:
    """Compare the inputs of the token graphs with the manifest."""
    if missing := {"input_ids", *manifest.indices} - {tensor.name for tensor in manifest.graphs[GRAPH].inputs}:
        raise ArtifactError(f"{MANIFEST} indices", ", ".join(sorted(missing)), f"inputs of {GRAPH}")
    known = {"input_ids", "offset", "attention_mask", *([CONTEXT] if manifest.history else []), *manifest.indices}
    for graph in filter(manifest.graphs.__contains__, TOKEN_GRAPHS):
        if unknown := {tensor.name for tensor in manifest.graphs[graph].inputs} - known:
            raise ArtifactError(f"{graph} inputs", ", ".join(sorted(unknown)), ", ".join(sorted(known)))


def _check_history(manifest: Manifest) -> None:
    """Compare the history with the input `context` of the graphs."""
    history = manifest.history
    graphs = {name: graph for name, graph in manifest.graphs.items() if name in OUTPUT_GRAPHS}
    found = {
        name: tensor.shape[-1] for name, graph in graphs.items() for tensor in graph.inputs if tensor.name == CONTEXT
    }
    names = [name for name in graphs if name in (NGRAMS_GRAPH, NGRAM_IDS_GRAPH)] or [NGRAMS_GRAPH]
    expected = {} if history is None else dict.fromkeys(names, history.tokens)
    if found != expected:
        raise ArtifactError(f"{MANIFEST} history.tokens", expected or "nothing", f"{found or 'nothing'}, by its graphs")
    if history is not None and history.reset_id >= manifest.vocab_size:
        raise ArtifactError(f"{MANIFEST} history.reset_id", history.reset_id, f"0 to {manifest.vocab_size - 1}")


def _check_positioned(manifest: Manifest, sessions: Mapping[str, Session], positions: Float32) -> None:
    """Compare `positioned.onnx` with the plain graph."""
    positioned, plain = manifest.graphs[POSITIONED_GRAPH], manifest.graphs[manifest.plain]
    given = tuple(tensor for tensor in positioned.inputs if tensor.name == POSITION_EMBEDDINGS)
    others = tuple(tensor for tensor in plain.inputs if tensor.name != "offset")
    _compare(POSITIONED_GRAPH, "inputs", positioned.inputs, (*others, *given))
    embeddings = tuple(tensor for tensor in plain.outputs if tensor.name == EMBEDDINGS)
    # Earlier exports have a second output, which nothing reads.
    _compare(POSITIONED_GRAPH, "outputs", positioned.outputs[:1], embeddings)
    session = sessions[manifest.plain]
    runner = PositionedRunner(sessions[POSITIONED_GRAPH], positions, session)
    if not _same_vectors(manifest, runner, session):
        message = f"{MANIFEST} positions: the table gives other vectors than {manifest.plain}"
        raise ArtifactError(
            f"{MANIFEST} positions", manifest.positions, f"the table of {manifest.plain}", message=message
        )


def _check_kernel(manifest: Manifest, sessions: Mapping[str, Session], kernel: Runner) -> None:
    """Compare the fused kernel with the plain graph."""
    session = sessions[manifest.plain]
    if manifest.counts != "slots" or {tensor.name for tensor in session.inputs} != {"input_ids", "offset"}:
        message = f"{MANIFEST} kernel: expected none, since {manifest.plain} depends on more than ids and offset"
        raise ArtifactError(f"{MANIFEST} kernel", manifest.kernel, "none", message=message)
    try:
        same = _same_vectors(manifest, kernel, session)
    except Unavailable as error:
        raise ArtifactError(
            f"{MANIFEST} kernel", error.got, error.expected, message=f"{MANIFEST} kernel: {error}"
        ) from error
    if not same:
        message = f"{MANIFEST} kernel: the tables give other vectors than {manifest.plain}"
        raise ArtifactError(f"{MANIFEST} kernel", manifest.kernel, f"the tables of {manifest.plain}", message=message)


def _same_vectors(manifest: Manifest, runner: Runner, plain: Session) -> bool:
    """Return whether `runner` has the bits of the plain graph at the first and last position and id."""
    for offset, id_ in ((0, 0), (manifest.limit - 1, manifest.vocab_size - 1)):
        feeds = {tensor.name: np.zeros((1, 1), np.int64) for tensor in plain.inputs}
        feeds |= {"input_ids": np.array([[id_]]), "offset": np.array([offset])}
        twice = {name: values.repeat(2, 0) for name, values in feeds.items()}  # as in a micro-batch
        expected = plain.run(feeds, [EMBEDDINGS])[EMBEDDINGS].tobytes()
        # A repeated call may reuse a buffer.
        found = [runner.run(call, [EMBEDDINGS])[EMBEDDINGS].tobytes() for call in (feeds, feeds, twice)]
        if found != [expected, expected, 2 * expected]:
            return False
    return True


def _check_table_rows(graph: str, manifest: Manifest, session: Session) -> None:
    """Look up the last legal index of each input: a table with too few rows fails here."""
    # Padding has no position.
    feeds = dict.fromkeys(manifest.indices, 0) | {"input_ids": int(manifest.padding_id == 0), "attention_mask": 1}
    feeds |= {CONTEXT: 0}
    last = {"input_ids": manifest.vocab_size, **manifest.indices, "offset": manifest.max_len or 1}
    names = {"input_ids": "vocab_size", "offset": "max_len"}
    shapes = {tensor.name: (1, 1)[-len(tensor.shape) :] for tensor in session.inputs}
    if manifest.history and CONTEXT in shapes:
        shapes[CONTEXT] = (1, manifest.history.tokens)
    for name in filter(shapes.__contains__, last):
        values = {"offset": 0, **feeds, name: last[name] - 1}
        given = {input_: np.full(shape, values[input_], np.int64) for input_, shape in shapes.items()}
        if why := session.refusal(given):
            field = f"{MANIFEST} {names.get(name, f'indices.{name}')}"
            raise ArtifactError(field, last[name], f"at most the rows of {graph} ({why})")


def _compare(graph: str, side: str, declared: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    if declared != found:
        got, allowed = (", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in given) for given in (declared, found))
        raise ArtifactError(f"{MANIFEST} graphs.{graph}.{side}", got, f"the {side} of the graph: {allowed}")
