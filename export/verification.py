"""The proof of an artifact, during the export and again later."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from preblock.export.description import describe_artifact
from preblock.export.errors import ExportError, UnrepeatableError
from preblock.export.outputs import outputs_of
from preblock.export.parity import prove_rotary
from preblock.export.progress import Report, StepProgress
from preblock.export.publication import replace_file
from preblock.export.reference import NumpyReference, Reference
from preblock.export.referenced_tables import ReferencedTables
from preblock.export.shape_probe import ShapeProbe
from preblock.export.source import LoadedSource
from preblock.export.stored_tables import NarrowTable, read_data
from preblock.models.config import FrontEndConfig
from preblock.models.frontend_data import FrontEndData
from preblock.models.serialization import config_of
from preblock.models.torch_import import MissingTorchError, import_torch
from preblock.service.artifacts.io import check_files, read, read_manifest, write
from preblock.service.artifacts.manifest import Artifact, Manifest, StemManifest, TokenEmbeddings
from preblock.service.artifacts.names import DATA, EMBEDDINGS, EMBEDDINGS_GRAPH, GRAPH, MANIFEST, OUTPUT_GRAPHS, PARITY
from preblock.service.artifacts.onnx_check import check_graphs, check_ngram_tables
from preblock.service.artifacts.parity import OutputParity, Parity, ParityReport
from preblock.service.artifacts.references import check_references, open_reference
from preblock.service.core.errors import PreblockError
from preblock.service.runtime import providers as runtime_providers
from preblock.service.runtime import session as runtime_session
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.runner import Float32
from preblock.service.runtime.session import Session

if TYPE_CHECKING:
    from preblock.models.modules.stems import Stem

Prove = Callable[[Path, str, Report], Parity]
"""Proves the artifact in a folder equal on a provider."""
HUGE_BYTES = 2**27
"""Smallest data file, in bytes, to save memory for at the cost of time."""


def verify(
    folder: Path,
    report: Report = lambda _: None,
    provider: Literal["cpu", "cuda"] | None = None,
    reference_roots: Sequence[Path] = (),
) -> ParityReport:
    """Check the hashes of the artifact in `folder`, and prove its graphs equal to a reference again.

    The reference is built from the manifest and the stored weights: a PyTorch module if PyTorch is installed, else an
    evaluation with NumPy. All other fields of the manifest must follow from them. The result on `provider`, by default
    on every usable one, replaces its section of the parity report. Files outside the artifact must lie in
    `reference_roots`; the report receives their hashes.

    Raises:
        ExportError: a file differs from its hash, or a graph from the reference; a file is outside `reference_roots`;
            the provider cannot be used; or the report cannot be written.
        UnrepeatableError: the hashes agree, but the artifact does not describe its module.

    """
    try:
        providers = find_providers(provider)
        manifest = read_manifest(folder)
        report("checking the hashes")
        total = sum(file.bytes for file in manifest.files.values())
        check_files(folder, manifest, StepProgress(report, "checking the hashes", total).sha256)
        check_graphs(folder, manifest)
        check_ngram_tables(folder, manifest)
        check_references(manifest, reference_roots)
        hashes = _hash_references(folder, manifest, reference_roots, report)
        if manifest.front_end is None:
            raise UnrepeatableError(f"{folder}: hashes agree; the proof cannot be repeated without the custom module")
        try:
            frontend, prove_again = _build_again(manifest, manifest.front_end, folder)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ExportError(f"{folder}: manifest and weights disagree: {' '.join(str(error).split())}") from error
        loaded = LoadedSource(frontend, manifest.source)
        if isinstance(manifest, Manifest):
            loaded = replace(loaded, resized=manifest.resized, sentence=manifest.sentence)
            tables = ReferencedTables(manifest.ngram_tables, manifest.references) if hashes else ReferencedTables()
            beside = manifest.token_embeddings.beside if manifest.token_embeddings else {}
            loaded = replace(loaded, soft_prompts=manifest.soft_prompts, tables=tables, beside=beside)
        _check_manifest(manifest, describe_artifact(loaded, folder, report), folder)
        found = {name: prove_again(folder, name, report) for name in providers}
        return _record(folder, found, hashes).model_copy(update={"providers": found})
    except (PreblockError, MissingTorchError) as error:
        raise ExportError(str(error)) from error


def find_providers(provider: Literal["cpu", "cuda"] | None = None) -> list[str]:
    """Return the onnxruntime name of `provider`, or the names of all usable providers."""
    if provider == "cpu":
        return [CPU]
    reason = runtime_providers.cuda_unavailable_reason()
    if provider == "cuda" and reason:
        raise ExportError(f"provider cuda cannot be used: {reason}")
    return [runtime_providers.CUDA] if provider == "cuda" else [CPU] if reason else [CPU, runtime_providers.CUDA]


def reference_of(data: FrontEndData, stored: Mapping[str, NarrowTable] = MappingProxyType({})) -> Reference:
    """Return the reference of a front-end: its PyTorch module if PyTorch is installed, else the NumPy evaluation.

    `stored` are tables in stored types; they replace those of `data`.

    Raises:
        RuntimeError: a tensor is missing, of another shape, or not of this front-end.

    """
    if find_spec("torch") is None:
        return NumpyReference(data, stored)
    from preblock.export.torch_reference import TorchReference

    return TorchReference.of(data, stored)


def prove_artifact(reference: Reference, folder: Path, provider: str, report: Report) -> Parity:
    """Prove every graph in `folder` equal to `reference` on `provider`."""
    step = _name_step(provider)
    report(step)

    outputs: dict[str, OutputParity] = {}
    open_graph = partial(open_session, folder, provider)
    # No variable holds a session, because an open one keeps the memory of its runs.
    for graph, output in outputs_of(reference).items():
        if graph in OUTPUT_GRAPHS:
            ShapeProbe(reference, open_graph(graph), graph).check()
        if output.calls:
            outputs |= output.prove(reference, open_graph(graph), StepProgress(report, f"{step}: {graph}"))
    if reference.signature.rotary:
        outputs |= prove_rotary(reference, open_graph(GRAPH), open_graph(EMBEDDINGS_GRAPH))
    return Parity(onnxruntime=runtime_providers.VERSION, reference=reference.version, outputs=outputs)


def prove_stem_artifact(stem: "Stem", folder: Path, provider: str, report: Report) -> Parity:
    """Prove the graph in `folder` equal to the PyTorch module `stem` on `provider`."""
    from preblock.export.stems.graph import prove_stem
    from preblock.export.torch_reference import VERSION

    step = _name_step(provider)
    report(step)
    outputs = {EMBEDDINGS: prove_stem(stem, open_session(folder, provider, GRAPH), StepProgress(report, step).cases)}
    return Parity(onnxruntime=runtime_providers.VERSION, reference=VERSION, outputs=outputs)


def _name_step(provider: str) -> str:
    return "proving it equal" if provider == CPU else f"proving it equal on {provider}"


def _check_manifest(manifest: Artifact, derived: Artifact, folder: Path) -> None:
    """Compare the manifest in `folder` with one derived from its weights; all but `versions` must agree.

    Raises:
        ExportError: a field differs.

    """
    for name in type(manifest).model_fields:
        stated, true = getattr(manifest, name), getattr(derived, name)
        if isinstance(stated, TokenEmbeddings) and isinstance(true, TokenEmbeddings):  # releases learn of consumers
            true = true.model_copy(update={"consumers": stated.consumers})
        if name != "versions" and stated != true:
            raise ExportError(f"{folder / MANIFEST}: {name} is {stated!r}, but the artifact has {true!r}")


def _build_again(manifest: Artifact, document: dict[str, Any], folder: Path) -> tuple[Any, Prove]:
    """Return the front-end described by the manifest, with the weights of the artifact, and its proof."""
    if isinstance(manifest, StemManifest):
        import_torch("the proof of an image or audio stem")
        from preblock.export.stems.graph import read_stem_weights
        from preblock.models.modules import stems

        stem_config = config_of(document, stems.KINDS)
        stem = stems.from_tensors(stem_config, read_stem_weights(folder, stem_config))
        return stem, partial(prove_stem_artifact, stem)
    data, stored = read_data(folder, FrontEndConfig.from_document(document))
    return data, partial(prove_artifact, reference_of(data, stored))


def _hash_references(folder: Path, manifest: Artifact, roots: Sequence[Path], report: Report) -> dict[str, str]:
    """Return the SHA-256 of each file outside the artifact.

    Raises:
        ExportError: it differs from the published one, or from the one in the parity report.

    """
    references = manifest.references if isinstance(manifest, Manifest) else {}
    known = read(ParityReport, folder / PARITY).references
    step = "hashing the referenced files"
    progress = StepProgress(report, step, sum(reference.bytes for reference in references.values()))
    hashes = {}
    for path, reference in references.items():
        with open_reference(path, roots) as stream:
            hashes[path] = progress.sha256(stream)
        expected = reference.sha256 or known.get(path, hashes[path])
        if hashes[path] != expected:
            origin = "as published" if reference.sha256 else "as an earlier verification found"
            raise ExportError(f"{path}: got sha256 {hashes[path][:12]}…, expected {expected[:12]}…, {origin}")
    return hashes


def _record(folder: Path, found: dict[str, Parity], hashes: dict[str, str]) -> ParityReport:
    """Replace the sections of the proven providers and the hashes in the parity report, and return the report."""
    recorded = read(ParityReport, folder / PARITY)
    same = all(recorded.providers.get(provider) == parity for provider, parity in found.items())
    if same and recorded.references == hashes:
        return recorded  # no write needed, perhaps not permitted
    try:
        with replace_file(folder / PARITY) as file:
            # Read again under the lock: another process may have added a provider.
            recorded = read(ParityReport, folder / PARITY)
            update = {"providers": recorded.providers | found, "references": hashes}
            report = recorded.model_copy(update=update)
            write(report, file)
    except OSError as error:
        raise ExportError(f"{folder / PARITY}: proven, but not recorded: {error.strerror}") from error
    return report


class ReopeningSession(Session):
    """A session on the CPU, reopened after each run.

    The pages of the data file read by a run stay in memory until the session is closed.
    """

    def __init__(self, folder: Path, graph: str) -> None:
        self._of = folder, graph
        super().__init__(folder, graph=graph)

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> dict[str, Float32]:
        """Return the outputs of the graph, and reopen the session."""
        found = super().run(feeds, outputs)
        folder, graph = self._of
        super().__init__(folder, graph=graph)
        return found


def open_session(folder: Path, provider: str, graph: str) -> Session:
    """Open a graph in `folder` for a proof. On the CPU, a huge one is reopened after each run."""
    if provider == CPU and (folder / DATA).stat().st_size >= HUGE_BYTES:
        return ReopeningSession(folder, graph)
    return runtime_session.open_session(folder, provider, graph=graph)
