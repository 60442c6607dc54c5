"""Loads an artifact: checks it, opens its graphs, and runs each once."""

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.checksums import Checksums
from preblock.service.artifacts.io import check_files, read, read_with_identity
from preblock.service.artifacts.manifest import Manifest, StemManifest, Tensor
from preblock.service.artifacts.names import (
    CONTEXT,
    EMBEDDINGS,
    GRAPH,
    MANIFEST,
    NGRAM_IDS_GRAPH,
    NGRAM_ROWS_GRAPH,
    NGRAMS_GRAPH,
    OUTPUT_GRAPHS,
    PARITY,
    SOFT_PROMPTS,
    TOKEN_EMBEDDINGS,
    TOKEN_GRAPHS,
    TOKENIZER,
)
from preblock.service.artifacts.onnx_check import check_graphs, check_ngram_tables
from preblock.service.artifacts.parity import ParityReport
from preblock.service.artifacts.references import check_references, read_signatures
from preblock.service.core.errors import ArtifactError, Unavailable
from preblock.service.core.files import FileSignature, signature_of
from preblock.service.core.tasks import start_thread
from preblock.service.core.types import POSITION_ROWS
from preblock.service.runtime.cuda_embedding import CudaLookup
from preblock.service.runtime.fused_embedding import BUILT, FusedLookup, map_tables
from preblock.service.runtime.means import map_lookup
from preblock.service.runtime.model import EncoderStem, ServedModel, TokenModel, open_position_rows
from preblock.service.runtime.ngram_ids import open_ngram_ids
from preblock.service.runtime.ngram_rows import open_ngram_rows
from preblock.service.runtime.providers import CPU, ON_CPU, ProviderChoice
from preblock.service.runtime.runner import Float32, Runner
from preblock.service.runtime.session import Session, open_session
from preblock.service.runtime.table_memory import TableMemory
from preblock.service.runtime.table_warm_up import warm_up
from preblock.service.runtime.tokenizer import Tokenizer


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
    for name, (width, output) in declared.items():
        if width != widths.get(output):
            raise ArtifactError(f"{MANIFEST} {name}", width, f"{widths.get(output)}, the width of {output}")


OWN_INPUTS = frozenset(("input_ids", "position_ids", POSITION_ROWS, "attention_mask", "offset", CONTEXT))
"""Inputs with a meaning of their own in a request. A further input with such a name would replace them."""


def _check_inputs(manifest: Manifest) -> None:
    """Compare the inputs of the token graphs with the manifest."""
    if taken := OWN_INPUTS & manifest.indices.keys():
        raise ArtifactError(f"{MANIFEST} indices", ", ".join(sorted(taken)), "names of further inputs")
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


def _compare_tensors(graph: str, side: str, declared: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    """Compare the declared inputs or outputs of a graph, by `side`, with those found."""
    if declared != found:
        got, allowed = (", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in given) for given in (declared, found))
        raise ArtifactError(f"{MANIFEST} graphs.{graph}.{side}", got, f"the {side} of the graph: {allowed}")


OPEN_TIMEOUT_SECONDS = 60.0
"""The largest published tables open in a few seconds: onnxruntime maps them."""
END_SECONDS, END_PAUSE_SECONDS = 5.0, 0.01
"""Longest wait for opening graphs at the end of the process, and the time between two looks."""
OPENING = "open "
"""Begins the name of a thread that opens graphs."""


@atexit.register
def _finish_opening() -> None:
    """Wait for threads within onnxruntime: the end of the interpreter would abort the process there."""
    end = time.monotonic() + END_SECONDS
    with suppress(SystemExit, KeyboardInterrupt):
        # Not `join`: it fails for a thread whose start the signal has interrupted.
        while any(thread.name.startswith(OPENING) for thread in threading.enumerate()) and time.monotonic() < end:
            time.sleep(END_PAUSE_SECONDS)


@dataclass(frozen=True, kw_only=True)
class ModelLoader:
    """Loads artifacts with the options of a process.

    Args:
        choice: the provider, by model; default: the CPU.
        memory: of the n-gram tables of all models; default: without a budget.
        threads: of one call.
        gpu_mem_limit_bytes: GPU memory limit of one graph; None: no limit.
        reference_roots: folders of files outside the artifact; default: none allowed.
        open_timeout_seconds: time to open the graphs and to run each once, without the time to hash the files.

    """

    choice: ProviderChoice = ON_CPU
    memory: TableMemory = field(default_factory=TableMemory)
    threads: int = 1
    gpu_mem_limit_bytes: int | None = None
    reference_roots: Sequence[Path] = ()
    open_timeout_seconds: float = OPEN_TIMEOUT_SECONDS

    def load(self, name: str, version: int, folder: Path, checksums: Checksums) -> ServedModel:
        """Check the artifact of a model in `folder`, open its graphs, and run each once.

        `checksums` are hashes that earlier runs computed.

        Raises:
            ArtifactError: the artifact is broken, its files contradict each other, or its graphs do not open in time.

        """
        manifest, identity = read_with_identity(folder)
        parity = read(ParityReport, folder / PARITY)
        signatures, references = _check_files(folder, manifest, checksums, self.reference_roots)
        provider = self.choice.for_model(manifest).active
        sessions, lookups = self._open_in_time(f"{name}/{version}", folder, manifest, provider)
        _check_unchanged(folder, signatures, references)
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
            ngrams = open_ngram_rows(folder, manifest, ids, self.memory, references)
            warm_up(f"model {name} version {version}", ngrams, manifest, self.memory)
        return TokenModel(manifest=manifest, ngrams=ngrams, **lookups, **served)

    def _open_in_time(
        self, title: str, folder: Path, manifest: Manifest | StemManifest, provider: str
    ) -> tuple[dict[str, Session], dict[str, Any]]:
        """Return the result of `_open`; raise ArtifactError after the timeout."""
        seconds = self.open_timeout_seconds
        work = partial(_open, folder, manifest, provider, self.threads, self.gpu_mem_limit_bytes)
        # Nothing can stop onnxruntime: after the timeout, the thread works on, and its result is dropped.
        try:
            return start_thread(work, f"{OPENING}{title}").result(seconds)
        except TimeoutError:
            got, allowed = f"more than {seconds:g} s", f"at most {seconds:g} s"
            message = f"the graphs did not open and run within {seconds:g} s"
            raise ArtifactError("graphs", got, allowed, message=message) from None


def _open(
    folder: Path, manifest: Manifest | StemManifest, provider: str, threads: int, gpu_mem_limit_bytes: int | None
) -> tuple[dict[str, Session], dict[str, Any]]:
    """Open, check and run the graphs, the tables and the tokenizer; return graphs, and arguments of `TokenModel`."""
    sessions = _open_sessions(folder, manifest, provider, threads, gpu_mem_limit_bytes)
    _check_sessions(folder, manifest, sessions, provider)
    lookups: dict[str, Any] = {}
    if isinstance(manifest, Manifest):
        lookups = _open_lookups(folder, manifest, sessions, provider, gpu_mem_limit_bytes)
        if lookups["tokenizer"] is not None:
            lookups["tokenizer"].check()
    for session in sessions.values():
        session.warm_up({tensor.name: _smallest_input(tensor, manifest) for tensor in session.inputs})
    return sessions, lookups


def _check_files(
    folder: Path, manifest: Manifest | StemManifest, checksums: Checksums, reference_roots: Sequence[Path]
) -> tuple[dict[str, FileSignature], dict[str, FileSignature]]:
    """Check the files before onnxruntime opens them; return signatures of the artifact's files, and of referenced ones.

    Raises:
        ArtifactError: a file differs from the manifest, or from another file.

    """
    if GRAPH not in manifest.graphs:
        raise ArtifactError(f"{MANIFEST} graphs", ", ".join(manifest.graphs) or "nothing", f"at least {GRAPH}")
    signatures = check_files(folder, manifest, checksums.sha256)
    check_graphs(folder, manifest)
    check_ngram_tables(folder, manifest)
    return signatures, check_references(manifest, reference_roots)


def _check_unchanged(
    folder: Path, signatures: Mapping[str, FileSignature], references: Mapping[str, FileSignature]
) -> None:
    """Raise ArtifactError if a file has changed since `_check_files`."""
    for file, signature in signatures.items():
        if signature_of((folder / file).stat()) != signature:
            message = f"{file} changed while it was opened"
            raise ArtifactError(file, "a change while it was opened", "the checked file", message=message)
    if read_signatures(references) != references:
        message = f"{MANIFEST} references: a file changed while it was opened"
        raise ArtifactError(f"{MANIFEST} references", "a changed file", "the checked file", message=message)


def _check_sessions(
    folder: Path, manifest: Manifest | StemManifest, sessions: Mapping[str, Session], provider: str
) -> None:
    """Raise ArtifactError if an opened graph differs from the manifest."""
    for graph, session in sessions.items():
        declared = manifest.graphs[graph]
        _compare_tensors(graph, "inputs", declared.inputs, session.inputs)
        _compare_tensors(graph, "outputs", declared.outputs, session.outputs)
    _check_widths(manifest)
    if isinstance(manifest, StemManifest):
        _compare_tensors(GRAPH, "inputs", (manifest.input,), sessions[GRAPH].inputs)
        return
    _check_history(manifest)
    _check_inputs(manifest)
    for graph in filter(sessions.__contains__, TOKEN_GRAPHS):
        # Only the CPU rejects an index beyond the table.
        session = sessions[graph] if provider == CPU else Session(folder, CPU, 1, graph)
        _check_table_rows(graph, manifest, session)


def _open_lookups(
    folder: Path, manifest: Manifest, sessions: Mapping[str, Session], provider: str, gpu_mem_limit_bytes: int | None
) -> dict[str, Any]:
    """Open and check the tables, and further files; return them as arguments of `TokenModel`.

    Raises:
        ArtifactError: the data file does not hold a table, or a table gives other vectors than the graph.

    """
    tables = gpu_lookup = None
    if manifest.kernel is not None:
        mapped = map_tables(folder, manifest, manifest.kernel)
        if provider != CPU:
            gpu_lookup = CudaLookup(mapped, gpu_mem_limit_bytes)
            _check_kernel(manifest, sessions, gpu_lookup)
        elif BUILT:
            tables = mapped
            _check_kernel(manifest, sessions, FusedLookup(tables, sessions[manifest.plain]))
    return {
        "tables": tables,
        "gpu_lookup": gpu_lookup,
        "lookup_table": map_lookup(folder, manifest) if provider == CPU else None,
        "soft_prompts": _map_soft_prompts(folder, manifest),
        "position_rows": open_position_rows(folder, manifest),
        "tokenizer": _open_tokenizer(folder, manifest),
    }


def _open_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer | None:
    file = manifest.files.get(TOKENIZER)
    return None if file is None else Tokenizer(folder / TOKENIZER, file, manifest.vocab_size)


def _open_sessions(
    folder: Path, manifest: Manifest | StemManifest, provider: str, threads: int, gpu_mem_limit_bytes: int | None
) -> dict[str, Session]:
    """Open the graphs that the service runs."""
    tables = isinstance(manifest, Manifest) and bool(manifest.ngram_tables)
    left_out = {NGRAM_ROWS_GRAPH}  # for other runtimes
    on_cpu = {NGRAM_IDS_GRAPH} if tables else set()
    if provider != CPU:
        if tables:
            left_out.add(NGRAMS_GRAPH)  # too large for a GPU: the CPU gathers their rows
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


def _map_soft_prompts(folder: Path, manifest: Manifest) -> dict[str, Float32]:
    """Map the vectors of each soft prompt, float32 (N, width of a token vector).

    Raises:
        ArtifactError: the file does not hold them.

    """
    prompts = manifest.soft_prompts
    if not prompts:
        return {}
    if manifest.token_embeddings is None or SOFT_PROMPTS not in manifest.files:
        raise ArtifactError(f"{MANIFEST} soft_prompts", ", ".join(prompts), f"token_embeddings and {SOFT_PROMPTS}")
    width, size = manifest.token_embeddings.width, manifest.files[SOFT_PROMPTS].bytes
    rows = sum(prompt.rows for prompt in prompts.values())
    ends = [prompt.first + prompt.rows for prompt in prompts.values()]
    if size != 4 * width * rows or max(ends) > rows:
        got = f"{rows} rows up to row {max(ends)}"
        raise ArtifactError(f"{MANIFEST} soft_prompts", got, f"the rows of {SOFT_PROMPTS}, {size} bytes")
    table = np.memmap(folder / SOFT_PROMPTS, np.float32, "r", 0, (rows, width)).view(np.ndarray)
    return {name: table[prompt.first : prompt.first + prompt.rows] for name, prompt in prompts.items()}
