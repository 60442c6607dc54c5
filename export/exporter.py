"""From a source to a proven artifact in a repository, and the proof once more."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import onnx
import torch
from torch import nn

from preblock import __version__
from preblock.export.bias import export_bias, prove_bias, read_bias
from preblock.export.errors import ExportError
from preblock.export.graph import describe_graph, export_graph, read_initializers
from preblock.export.graph_metadata import label_graphs
from preblock.export.low_memory_session import open_session
from preblock.export.parity import prove, prove_lookup, prove_positioned, prove_rotary, prove_tiles
from preblock.export.position_inputs import positions_of, write_positioned
from preblock.export.progress import Progress, Report
from preblock.export.publish import check_name, draft, publish, replacing
from preblock.export.quantization import build_narrow, compare_tables, read_format, sketch, write_tables
from preblock.export.shape_probe import Probe
from preblock.export.source import AnyFrontEnd, Choices, LoadedSource, load_source
from preblock.export.stem import export_stem, prove_stem, read_stem_weights
from preblock.export.table_formats import Format, find_format
from preblock.export.tiles import tiles_of, write_tiles
from preblock.models.checkpoints.position_resize import resized
from preblock.models.custom import CustomFrontEnd
from preblock.models.frontend import FrontEnd, FrontEndConfig
from preblock.models.modules import stems
from preblock.models.modules.stems import Stem
from preblock.service.artifacts.manifest import (
    BIAS_GRAPH,
    DATA,
    EMBEDDINGS,
    EMBEDDINGS_GRAPH,
    GRAPH,
    IN_TILES,
    MANIFEST,
    PARITY,
    POSITIONED,
    POSITIONED_GRAPH,
    TILES_GRAPH,
    TOKEN_EMBEDDINGS,
    TOKEN_GRAPH,
    TOKEN_GRAPHS,
    TOKENIZER,
    Artifact,
    Manifest,
    OutputParity,
    Parity,
    ParityReport,
    Resized,
    Rotary,
    Source,
    StemManifest,
    StoredTable,
    Tensor,
    TokenEmbeddings,
    check_files,
    describe,
    read,
    read_manifest,
    write,
)
from preblock.service.artifacts.onnx_check import check_graphs
from preblock.service.core.errors import PreblockError
from preblock.service.runtime import session as runtime_session
from preblock.service.runtime.position_table import map_positions
from preblock.service.runtime.session import CPU, Session


@dataclass(frozen=True)
class Exported:
    """An artifact that was published."""

    folder: Path
    manifest: Manifest | StemManifest
    parity: ParityReport


def export(
    source: str,
    name: str,
    repository: Path,
    report: Report = lambda _: None,
    max_len: int | None = None,
    resizing: str | None = None,
    dtype: str = "float32",
    scale: str | None = None,
    **choices: Unpack[Choices],
) -> Exported:
    """Export the front-end that `source` names as the next version of `name` in `repository`.

    It is proven on every provider of onnxruntime that is usable here.
    `max_len` sets another limit than the source's, `resizing` how a learned table is made to fit, as in `resized`;
    `dtype` is the type that tables are stored in, and `scale` says what has a scale of its own in int8, as in
    `find_format`; `choices` are those of `read_frontend`. `report` is told each step as it begins. An export that fails
    or is interrupted leaves nothing to be seen.

    Raises:
        ExportError: the source cannot be read, the graph is not equal to its module, or the disk refuses.

    """
    check_name(name)
    format_ = find_format(dtype, scale)
    report(f"reading {source}")

    def load() -> LoadedSource:
        loaded = load_source(source, report, widen=format_ is None, **choices)
        if isinstance(loaded.frontend, FrontEnd) and loaded.frontend.config.no_rotary:
            report(f"leaving rotary outputs out: {loaded.frontend.config.no_rotary}")
        if max_len is not None:
            return _resize(loaded, max_len, resizing)
        if resizing is not None:
            raise ExportError(f"--resize: got {resizing!r}, allowed only with --max-len")
        return loaded

    # Nothing here keeps what was loaded: once its tables are rounded, the proof has their memory.
    return export_loaded(load(), name, repository, report, format_)


def export_loaded(
    loaded: LoadedSource,
    name: str,
    repository: Path,
    report: Report = lambda _: None,
    format_: Format | None = None,
) -> Exported:
    """Export a front-end that is in memory already; otherwise as `export`. It stays in the mode that it was in.

    Its tables are stored in `format_`; default None: in float32.
    """
    source = loaded.frontend
    training = source.training
    source.eval()
    try:
        if format_:
            _check_format(source, format_)
        with draft(repository, name) as folder:
            report("writing the graph")
            storage: dict[str, StoredTable] = {}
            if format_ is None:
                _write_graphs(source, folder, report)
            else:
                loaded, storage = _store(loaded, format_, folder, report)
                source.train(training)
                source = loaded.frontend
            if not isinstance(loaded.frontend, Stem):
                write_tiles(folder)
                write_positioned(folder)
            label_graphs(folder, loaded.frontend.signature)
            if loaded.tokenizer:
                shutil.copyfile(loaded.tokenizer, folder / TOKENIZER)
            manifest = _describe(loaded, folder, report)
            write(manifest, folder / MANIFEST)
            check_graphs(folder, manifest)
            parity = ParityReport(
                providers={provider: _prove(loaded.frontend, folder, provider, report) for provider in _providers()},
                storage=storage,
            )
            write(parity, folder / PARITY)
            version = publish(folder)
            return Exported(repository / name / str(version), manifest, parity)
    except OSError as error:
        raise ExportError(f"{error.filename or repository}: {error.strerror}") from error
    except PreblockError as error:
        raise ExportError(str(error)) from error
    finally:
        source.train(training)


def export_module(
    module: nn.Module, name: str, repository: Path, *, vocab_size: int, max_len: int, exact: bool = False
) -> Exported:
    """Export a module of one's own as the next version of `name` in `repository`, and prove its graph equal to it.

    The arguments are those of `CustomFrontEnd`. The artifact does not hold the module, so that `verify` can check its
    hashes, but not prove it again.

    Raises:
        ExportError: the module returns no vectors, the graph is not equal to it, or the disk refuses.

    """
    training = module.training
    module.eval()
    try:
        frontend = CustomFrontEnd(module, vocab_size, max_len, exact)
        return export_loaded(LoadedSource(frontend, Source(kind="module")), name, repository)
    except ValueError as error:
        raise ExportError(str(error)) from error
    finally:
        module.train(training)


def verify(
    folder: Path, report: Report = lambda _: None, provider: Literal["cpu", "cuda"] | None = None
) -> ParityReport:
    """Check the hashes of the artifact in `folder`, and prove its graphs equal to a PyTorch module once more.

    The module is built from the manifest around the weights that the artifact holds; what else the manifest says must
    follow from it. What is found on `provider`, by default on every one that is usable here, is returned, and takes its
    place in the parity report of the artifact.

    Raises:
        ExportError: a file differs from its hash, or a graph from the module; the provider cannot be used; or the
            report cannot be written.

    """
    try:
        providers = _providers(provider)
        manifest = read_manifest(folder)
        report("checking the hashes")
        total = sum(file.bytes for file in manifest.files.values())
        check_files(folder, manifest, Progress(report, "checking the hashes", total).sha256)
        check_graphs(folder, manifest)
        if manifest.front_end is None:
            raise ExportError(f"{folder}: the hashes agree; the module that it came from alone can prove it again")
        try:
            frontend = _build_again(manifest, manifest.front_end, folder)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ExportError(f"{folder}: manifest and weights disagree: {' '.join(str(error).split())}") from error
        resized = manifest.resized if isinstance(manifest, Manifest) else None
        again = _describe(LoadedSource(frontend, manifest.source, resized=resized), folder, report)
        for name in type(manifest).model_fields:
            told, true = getattr(manifest, name), getattr(again, name)
            if name != "versions" and told != true:
                raise ExportError(f"{folder / MANIFEST}: {name} is {told!r}, that of the artifact is {true!r}")
        found = {name: _prove(frontend, folder, name, report) for name in providers}
        return _record(folder, found).model_copy(update={"providers": found})
    except PreblockError as error:
        raise ExportError(str(error)) from error


def _resize(loaded: LoadedSource, max_len: int, resizing: str | None) -> LoadedSource:
    if not isinstance(loaded.frontend, FrontEnd):
        raise ExportError(f"--max-len: got {max_len}, allowed only for front-ends of token ids")
    try:
        frontend = resized(loaded.frontend, max_len, resizing)
    except ValueError as error:
        raise ExportError(f"--max-len and --resize: {error}") from error
    record = Resized(from_max_len=loaded.frontend.signature.max_len, method=resizing)
    return replace(loaded, frontend=frontend, resized=record)


def _check_format(frontend: AnyFrontEnd, format_: Format) -> None:
    if not isinstance(frontend, FrontEnd):
        what = "a stem" if isinstance(frontend, Stem) else "a module of one's own"
        raise ExportError(f"--dtype: got {format_.dtype!r}, allowed only float32 for {what}")


def _store(
    loaded: LoadedSource, format_: Format, folder: Path, report: Report
) -> tuple[LoadedSource, dict[str, StoredTable]]:
    """Write the graphs over tables in `format_`; return what they are worth, and how that differs from `loaded`."""
    frontend = loaded.frontend
    assert isinstance(frontend, FrontEnd)
    _write_graphs(sketch(frontend), folder, report)
    report(f"rounding the tables to {format_.dtype}")
    write_tables(frontend, format_, folder, report)
    report("comparing the tables")
    storage = compare_tables(frontend, format_, folder, report)
    narrow = build_narrow(frontend.config, frontend.state_dict(), format_, folder)
    return replace(loaded, frontend=narrow), storage


def _write_graphs(frontend: AnyFrontEnd, folder: Path, report: Report) -> None:
    if isinstance(frontend, Stem):
        export_stem(frontend, folder, report)
        return
    export_graph(frontend, folder, report)
    if isinstance(frontend, FrontEnd) and frontend.config.bias is not None:
        export_bias(frontend.bias, folder)


def _build_again(manifest: Artifact, document: dict[str, Any], folder: Path) -> FrontEnd | Stem:
    """Return the module that the manifest describes around the weights of the artifact."""
    if isinstance(manifest, StemManifest):
        stem_config = stems.from_document(document)
        return stems.from_tensors(stem_config, read_stem_weights(folder, stem_config))
    config = FrontEndConfig.from_document(document)
    weights, format_ = read_initializers(folder) | read_bias(folder), read_format(folder)
    return build_narrow(config, weights, format_, folder) if format_ else FrontEnd.from_tensors(config, weights)


def _providers(provider: Literal["cpu", "cuda"] | None = None) -> list[str]:
    """Return the onnxruntime name of `provider`, or those of all that are usable here."""
    if provider == "cpu":
        return [CPU]
    reason = runtime_session.why_no_cuda()
    if provider == "cuda" and reason:
        raise ExportError(f"--provider: got cuda, allowed cpu, since {reason}")
    return [runtime_session.CUDA] if provider == "cuda" else [CPU] if reason else [CPU, runtime_session.CUDA]


def _record(folder: Path, found: dict[str, Parity]) -> ParityReport:
    """Put what was found on each provider into the parity report of the artifact, and return the report."""
    told = read(ParityReport, folder / PARITY)
    if all(told.providers.get(provider) == parity for provider, parity in found.items()):
        return told  # nothing to write, perhaps no right to
    try:
        with replacing(folder / PARITY) as file:
            # Read once more: another may have proven it on another provider meanwhile.
            told = read(ParityReport, folder / PARITY)
            report = told.model_copy(update={"providers": told.providers | found})
            write(report, file)
    except OSError as error:
        raise ExportError(f"{folder / PARITY}: proven, but not recorded: {error.strerror}") from error
    return report


def _prove(frontend: AnyFrontEnd, folder: Path, provider: str, report: Report) -> Parity:
    step = "proving it equal" if provider == CPU else f"proving it equal on {provider}"
    report(step)

    def session(graph: str = GRAPH) -> Session:
        return open_session(folder, provider, graph)

    outputs: dict[str, OutputParity] = {}
    if isinstance(frontend, Stem):
        outputs[EMBEDDINGS] = prove_stem(frontend, session(), Progress(report, step).cases)
    else:
        graphs = [graph for graph in (*TOKEN_GRAPHS, TILES_GRAPH) if (folder / graph).is_file()]
        if provider != CPU:
            graphs = [graph for graph in graphs if graph != TILES_GRAPH]
        for graph in graphs:
            Probe(frontend, session(graph), graph).check()
        others: dict[str, OutputParity] = {}
        plain = EMBEDDINGS_GRAPH if EMBEDDINGS_GRAPH in graphs else GRAPH
        # Sessions keep what a run took for as long as they are open.
        if TILES_GRAPH in graphs:
            told = Progress(report, "proving tiles equal").add
            others[IN_TILES] = prove_tiles(frontend.signature, session(TILES_GRAPH), session(plain), told)
        if provider == CPU and (folder / POSITIONED_GRAPH).is_file():
            told = Progress(report, "proving given positions equal").add
            manifest = read_manifest(folder)
            assert isinstance(manifest, Manifest)
            given = session(POSITIONED_GRAPH), map_positions(folder, manifest)
            others[POSITIONED] = prove_positioned(frontend.signature, *given, session(plain), told)
        outputs |= {EMBEDDINGS: prove(frontend, session(), Progress(report, step).cases)} | others
    if isinstance(frontend, FrontEnd):
        signature = frontend.signature
        step, width = "proving the lookup equal", signature.lookup_width or signature.width
        progress = Progress(report, step, 4 * signature.vocab_size * width)
        if signature.lookup_width is not None:
            outputs[TOKEN_EMBEDDINGS] = prove_lookup(frontend, session(TOKEN_GRAPH), progress.add)
        elif frontend.config.only_looks_up:
            every_id = prove_lookup(frontend, session(), progress.add)
            cases = (*outputs[EMBEDDINGS].cases, *every_id.cases)
            outputs[EMBEDDINGS] = outputs[EMBEDDINGS].model_copy(update={"cases": cases})
        if frontend.signature.rotary:
            report("proving the rotary outputs equal")
            outputs |= prove_rotary(frontend, session(), session(EMBEDDINGS_GRAPH))
        if frontend.config.bias is not None:
            bias = session(BIAS_GRAPH)
            outputs[bias.outputs[0].name] = prove_bias(frontend.bias, bias)
    return Parity(onnxruntime=runtime_session.VERSION, torch=torch.__version__, outputs=outputs)


def _describe(loaded: LoadedSource, folder: Path, report: Report) -> Manifest | StemManifest:
    frontend, signature = loaded.frontend, loaded.frontend.signature
    graphs = [name for name in (*TOKEN_GRAPHS, TILES_GRAPH, POSITIONED_GRAPH, BIAS_GRAPH) if (folder / name).is_file()]
    files = [name for name in (*graphs, DATA, TOKENIZER) if (folder / name).is_file()]
    hashing = Progress(report, "hashing", sum((folder / name).stat().st_size for name in files))
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
        tiles=tiles_of(signature.width) if TILES_GRAPH in common["graphs"] else None,
        positions=positions_of(folder) if POSITIONED_GRAPH in common["graphs"] else None,
        resized=loaded.resized,
        front_end=frontend.config.to_document() if isinstance(frontend, FrontEnd) else None,
        **common,
    )
