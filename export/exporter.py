"""Exports a front-end: source, graphs, proof, published artifact."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Unpack

import numpy as np

from preblock.export.arguments import DEFAULTS, SourceOptions, check_arguments
from preblock.export.bias_graph import write_bias
from preblock.export.description import describe_artifact, label_graphs
from preblock.export.errors import ExportError, ParityError
from preblock.export.external_data import CHUNK_VALUES, split_rows
from preblock.export.graph import write_graphs
from preblock.export.origin import hash_source
from preblock.export.progress import Report
from preblock.export.publication import draft, publish
from preblock.export.quantization import compare_tables
from preblock.export.soft_prompts import parse_soft_prompts, write_soft_prompts
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


def export(
    source: str,
    name: str,
    repository: Path,
    report: Report = lambda _: None,
    max_len: int | None = None,
    resizing: str | None = None,
    dtype: str = "float32",
    scale: str | None = None,
    rotary_layout: Literal["full", "half", "fused"] = "full",
    rotary_dtype: Literal["float32", "float16"] = "float32",
    soft_prompts: Sequence[str] = (),
    **choices: Unpack[SourceOptions],
) -> ExportResult:
    """Export the front-end of `source` as the next version of `name` in `repository`.

    It is proven on every usable provider of onnxruntime. A failed or interrupted export leaves no files.

    Args:
        source: an existing folder, a preset, or `hf:owner/name[@revision]`.
        name: name of the model.
        repository: folder of the models.
        report: receives each step as it begins.
        max_len: limit of offset + tokens; default the source's.
        resizing: method to resize a learned position table, as in `resize_positions`.
        dtype: stored type of the tables.
        scale: unit with one scale in int8, as in `find_format`.
        rotary_layout: columns of the rotary outputs, the `form` of `RotaryOutput`.
        rotary_dtype: type of the rotary outputs, the `dtype` of `RotaryOutput`.
        soft_prompts: `NAME=FOLDER` of each soft prompt, saved by PEFT.
        choices: arguments of `read_frontend`.

    Raises:
        ExportError: the source cannot be read, the graph is not equal to its reference, or a file cannot be written.

    """
    check_arguments(source, name, choices, max_len, resizing, dtype, scale)
    format_, prompts = find_format(dtype, scale), parse_soft_prompts(soft_prompts)

    options: dict[str, Any] = {"max_len": max_len, "resizing": resizing, "dtype": dtype, "scale": scale}
    options |= {"rotary_layout": rotary_layout, "rotary_dtype": rotary_dtype, "soft_prompts": list(prompts), **choices}
    given = {name: value for name, value in options.items() if value not in DEFAULTS}

    def load() -> LoadedSource:
        # Before the source is loaded, so that a file that changes meanwhile counts as changed. An export with options
        # is never the same, and needs no hashes.
        files = {} if given else hash_source(source, report)
        loaded = load_source(source, report, widen=format_ is None, **choices)
        if isinstance(loaded.frontend, FrontEndData) and loaded.frontend.config.no_rotary:
            report(f"leaving rotary outputs out: {loaded.frontend.config.no_rotary}")
        if rotary_layout != "full":
            loaded = _change_rotary(loaded, "--rotary-layout", form=rotary_layout)
        if rotary_dtype != "float32":
            loaded = _change_rotary(loaded, "--rotary-dtype", dtype=rotary_dtype)
        loaded = replace(loaded, record=loaded.record.model_copy(update={"files": files, "options": given}))
        return loaded if max_len is None else _resize(loaded, max_len, resizing)

    try:
        # No reference to the loaded source stays here: the proof needs the memory of its unrounded tables.
        return export_loaded(load(), name, repository, report, format_, prompts)
    except MissingTorchError as error:
        raise ExportError(str(error)) from error


def export_loaded(
    loaded: LoadedSource,
    name: str,
    repository: Path,
    report: Report = lambda _: None,
    format_: TableFormat | None = None,
    soft_prompts: Mapping[str, Path] = MappingProxyType({}),
) -> ExportResult:
    """Export a loaded front-end, as `export` does. A module stays in evaluation mode.

    Tables are stored in `format_`; default float32. `soft_prompts` are folders by name.
    """
    if format_ and not isinstance(loaded.frontend, FrontEndData):
        raise ExportError(f"--dtype: got {format_.dtype!r}, expected only float32 for stems and custom modules")
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
        write_bias(source, folder)
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
    label_graphs(folder, source.signature)
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
        weights = {name: weight.detach().float().cpu().numpy() for name, weight in source.named_parameters()}
    for name, weight in weights.items():
        row = 0
        for rows in split_rows(np.atleast_1d(weight), CHUNK_VALUES):
            finite = np.isfinite(rows).all(axis=tuple(range(1, rows.ndim)))
            if not finite.all():
                place = "row" if weight.ndim > 1 else "element"
                return f"{name}: got NaN or infinity in {place} {row + int(finite.argmin())}, expected finite numbers"
            row += len(rows)
    return None


def _change_rotary(loaded: LoadedSource, option: str, **change: Any) -> LoadedSource:
    """Return the source with another form or dtype of its rotary outputs, as `option` requests."""
    source = loaded.frontend
    if not isinstance(source, FrontEndData) or not source.config.rotary:
        reason = source.config.no_rotary if isinstance(source, FrontEndData) else None
        reason = reason or "this front-end leaves none to attention"
        (got,) = change.values()
        raise ExportError(f"{option}: got {got}, but the model has no rotary outputs: {reason}")
    try:
        rotary = tuple(replace(output, **change) for output in source.config.rotary)
    except ValueError as error:
        raise ExportError(f"{option}: {error}") from error
    config = replace(source.config, rotary=rotary)
    return replace(loaded, frontend=FrontEndData(config, source.tensors))


def _resize(loaded: LoadedSource, max_len: int, resizing: str | None) -> LoadedSource:
    if not isinstance(loaded.frontend, FrontEndData):
        raise ExportError("--max-len is only for front-ends of token ids; the source takes images or spectrograms")
    try:
        frontend = resize_positions(loaded.frontend, max_len, resizing)
    except ValueError as error:
        raise ExportError(f"--max-len and --resize: {error}") from error
    record = Resized(from_max_len=loaded.frontend.signature.max_len, method=resizing)
    return replace(loaded, frontend=frontend, resized=record)
