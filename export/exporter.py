"""Exports a front-end: source, graphs, proof, published artifact."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from preblock.export.description import describe_artifact, label_traced
from preblock.export.errors import ExportError, ParityError
from preblock.export.external_data import CHUNK_VALUES, split_rows
from preblock.export.options import ResolvedSource, resolve
from preblock.export.origin import hash_source
from preblock.export.outputs import write_graphs
from preblock.export.progress import Report
from preblock.export.publication import draft, publish
from preblock.export.quantization import compare_tables
from preblock.export.soft_prompts import write_soft_prompts
from preblock.export.source import AnyFrontEnd, LoadedSource, load_source
from preblock.export.stored_tables import read_stored
from preblock.export.table_formats import TableFormat, find_format
from preblock.export.verification import Prove, find_providers, prove_artifact, prove_stem_artifact, reference_of
from preblock.models.checkpoints.position_resize import resize_positions
from preblock.models.frontend_data import FrontEndData
from preblock.models.modules.signature import StemSignature
from preblock.models.torch_import import MissingTorchError
from preblock.service.artifacts.io import write
from preblock.service.artifacts.manifest import Manifest, Resized, StemManifest
from preblock.service.artifacts.names import MANIFEST, PARITY, TOKENIZER
from preblock.service.artifacts.onnx_check import check_graphs, check_ngram_tables
from preblock.service.artifacts.parity import ParityReport, StoredTable
from preblock.service.artifacts.references import check_references
from preblock.service.core.errors import PreblockError


@dataclass(frozen=True)
class ExportResult:
    """A published artifact; `warnings` are about its source."""

    folder: Path
    manifest: Manifest | StemManifest = field(repr=False)  # thousands of characters
    parity: ParityReport = field(repr=False)
    warnings: tuple[str, ...] = ()


def export(source: str, name: str, repository: Path, report: Report = lambda _: None, **options: Any) -> ExportResult:
    """Export the front-end of `source` as the next version of `name` in `repository`; arguments as in `resolve`.

    Raises:
        ExportError: as `resolve` and `export_source`.

    """
    return export_source(resolve(source, name, repository=repository, **options), repository, report)


def export_source(source: ResolvedSource, repository: Path, report: Report = lambda _: None) -> ExportResult:
    """Export a source as the next version of its model in `repository`.

    It is proven on every usable provider of onnxruntime. A failed or interrupted export leaves no files.

    Args:
        source: the source with its name and options.
        repository: folder of the models.
        report: receives each step as it begins.

    Raises:
        ExportError: the source cannot be read, the graph is not equal to its reference, or a file cannot be written.

    """
    options = source.options
    format_ = find_format(options.dtype, options.scale)
    try:
        # No reference to the loaded source stays here: the proof needs the memory of its unrounded tables.
        return export_loaded(_load(source, report), source.name, repository, report, format_, options.prompts)
    except MissingTorchError as error:
        raise ExportError(str(error)) from error


def _load(source: ResolvedSource, report: Report) -> LoadedSource:
    """Load a source, and change it as its options request."""
    options = source.options
    # Before the source is loaded, so that a file that changes meanwhile counts as changed. An export with options
    # is never the same, and needs no hashes.
    files = {} if options.given else hash_source(source, report)
    loaded = load_source(source, report)
    loaded = replace(loaded, record=loaded.record.model_copy(update={"files": files, "options": options.given}))
    if not isinstance(loaded.frontend, FrontEndData):
        return loaded
    if loaded.frontend.config.no_rotary:
        report(f"leaving rotary outputs out: {loaded.frontend.config.no_rotary}")
    changed = _change_rotary(loaded.frontend, "--rotary-layout", form=options.rotary_layout)
    changed = _change_rotary(changed, "--rotary-dtype", dtype=options.rotary_dtype)
    if options.max_len is None:
        return replace(loaded, frontend=changed)
    record = Resized(from_max_len=changed.signature.max_len, method=options.resizing)
    try:
        return replace(loaded, frontend=resize_positions(changed, options.max_len, options.resizing), resized=record)
    except ValueError as error:
        raise ExportError(f"--max-len and --resize: {error}") from error


def export_loaded(
    loaded: LoadedSource,
    name: str,
    repository: Path,
    report: Report = lambda _: None,
    format_: TableFormat | None = None,
    soft_prompts: Mapping[str, Path] = MappingProxyType({}),
) -> ExportResult:
    """Export a loaded front-end, as `export` does. A module stays in evaluation mode.

    Tables of front-ends with steps are stored in `format_`; default float32. `soft_prompts` are folders by name.
    """
    try:
        with draft(repository, name) as folder:
            loaded = write_soft_prompts(loaded, soft_prompts, folder)
            kept, prove, storage = _write_graphs(loaded.frontend, folder, report, format_)
            loaded = replace(loaded, frontend=kept)  # releases the unrounded tables
            if loaded.tokenizer:
                shutil.copyfile(loaded.tokenizer, folder / TOKENIZER)
            manifest = describe_artifact(loaded, folder, report)
            write(manifest, folder / MANIFEST)
            check_graphs(folder, manifest)
            check_ngram_tables(folder, manifest)
            check_references(manifest, [Path("/")])
            providers = {provider: prove(folder, provider, report) for provider in find_providers()}
            parity = ParityReport(
                providers=providers, storage=storage, discovery=loaded.discovery, tokenizer=loaded.conflicts
            )
            write(parity, folder / PARITY)
            warnings = [f"tokenizer: {conflict.summary()}" for conflict in loaded.conflicts]
            warnings += [loaded.warning] if loaded.warning else []
            return ExportResult(repository / name / str(publish(folder)), manifest, parity, tuple(warnings))
    except OSError as error:
        raise ExportError(f"{error.filename or repository}: {error.strerror}") from error
    except ParityError as error:
        raise ParityError("; ".join(filter(None, (str(error), _find_non_finite(loaded.frontend))))) from error
    except PreblockError as error:
        raise ExportError(str(error)) from error


def _write_graphs(
    source: AnyFrontEnd, folder: Path, report: Report, format_: TableFormat | None
) -> tuple[AnyFrontEnd, Prove, dict[str, StoredTable]]:
    """Write the graphs of `source`, and return it without tables in `format_`, the proof, and the errors of these."""
    if isinstance(source, FrontEndData):
        write_graphs(source, folder, report, format_)
        if format_ is None:
            return source, partial(prove_artifact, reference_of(source)), {}
        storage = compare_tables(source, format_, folder, report)
        stored = read_stored(folder, source.config)
        kept = FrontEndData(
            source.config, {name: values for name, values in source.tensors.items() if name not in stored}
        )
        return kept, partial(prove_artifact, reference_of(kept, stored)), storage
    proof = _trace(source.eval(), folder, report)
    label_traced(folder, source.signature)
    return source, proof, {}


def _trace(module: Any, folder: Path, report: Report) -> Prove:
    """Write the graph of a stem or of somebody's own module, and return its proof."""
    # Imported here, because they import torch.
    if isinstance(module.signature, StemSignature):
        from preblock.export.stems.graph import export_stem

        export_stem(module, folder, report)
        return partial(prove_stem_artifact, module)
    from preblock.export.own_modules.graph import export_custom
    from preblock.export.torch_reference import TorchReference

    export_custom(module, folder, report)
    return partial(prove_artifact, TorchReference(module))


def _find_non_finite(source: AnyFrontEnd) -> str | None:
    """Return an error about the first weight with NaN or infinity, if there is one: no graph equals its module then."""
    if isinstance(source, FrontEndData):
        weights = source.tensors
    else:
        given = chain(source.named_parameters(), source.named_buffers())
        weights = {name: weight.detach().float().cpu().numpy() for name, weight in given if not weight.is_complex()}
    for name, weight in weights.items():
        row = 0
        for rows in split_rows(np.atleast_1d(weight), CHUNK_VALUES):
            finite = np.isfinite(rows).all(axis=tuple(range(1, rows.ndim)))
            if not finite.all():
                place = "row" if weight.ndim > 1 else "element"
                return f"{name}: got NaN or infinity in {place} {row + int(finite.argmin())}, expected finite numbers"
            row += len(rows)
    return None


def _change_rotary(data: FrontEndData, option: str, **change: Any) -> FrontEndData:
    """Return the front-end with another form or dtype of its rotary outputs, as `option` requests."""
    (got,) = change.values()
    if got in ("full", "float32"):
        return data
    if not data.config.rotary:
        reason = data.config.no_rotary or "this front-end leaves none to attention"
        raise ExportError(f"{option}: got {got}, but the model has no rotary outputs: {reason}")
    try:
        rotary = tuple(replace(output, **change) for output in data.config.rotary)
    except ValueError as error:
        raise ExportError(f"{option}: {error}") from error
    return replace(data, config=replace(data.config, rotary=rotary))
