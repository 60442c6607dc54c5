"""Exports a front-end: source, graphs, proof, published artifact."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Unpack

import torch
from torch import nn

from preblock.export.arguments import SourceOptions, check_arguments
from preblock.export.bias import export_bias
from preblock.export.own_modules.graph import export_custom
from preblock.export.description import describe_artifact, label_graphs
from preblock.export.errors import ExportError, ParityError
from preblock.export.graph import export_graph
from preblock.export.progress import Report
from preblock.export.publication import draft, publish
from preblock.export.quantization import compare_tables, shrink_tables, write_tables
from preblock.export.soft_prompts import parse_soft_prompts, write_soft_prompts
from preblock.export.source import AnyFrontEnd, LoadedSource, load_source
from preblock.export.stems.graph import export_stem
from preblock.export.stored_tables import read_stored
from preblock.export.table_formats import TableFormat, find_format
from preblock.export.torch_reference import TorchReference
from preblock.export.verification import Prove, find_providers, prove_artifact, prove_stem_artifact
from preblock.models.checkpoints.position_resize import resize_positions
from preblock.models.config_check import check_described
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_data import FrontEndData
from preblock.models.modules.stems import Stem
from preblock.service.artifacts.io import write
from preblock.service.artifacts.manifest import Manifest, Resized, Source, StemManifest
from preblock.service.artifacts.names import MANIFEST, PARITY, TOKENIZER
from preblock.service.artifacts.ngram_check import check_ngram_tables
from preblock.service.artifacts.onnx_check import check_graphs
from preblock.service.artifacts.parity import ParityReport, StoredTable
from preblock.service.artifacts.references import check_references
from preblock.service.core.errors import PreblockError


@dataclass(frozen=True)
class ExportResult:
    """A published artifact."""

    folder: Path
    manifest: Manifest | StemManifest = field(repr=False)  # thousands of characters
    parity: ParityReport = field(repr=False)


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
        ExportError: the source cannot be read, the graph is not equal to its module, or a file cannot be written.

    """
    check_arguments(source, name, max_len, resizing, dtype, scale, choices)
    format_, prompts = find_format(dtype, scale), parse_soft_prompts(soft_prompts)

    def load() -> LoadedSource:
        loaded = load_source(source, report, widen=format_ is None, **choices)
        if isinstance(loaded.frontend, FrontEnd) and loaded.frontend.config.no_rotary:
            report(f"leaving rotary outputs out: {loaded.frontend.config.no_rotary}")
        if rotary_layout != "full":
            loaded = _change_rotary(loaded, "--rotary-layout", form=rotary_layout)
        if rotary_dtype != "float32":
            loaded = _change_rotary(loaded, "--rotary-dtype", dtype=rotary_dtype)
        return loaded if max_len is None else _resize(loaded, max_len, resizing)

    # No reference to the loaded source stays here: the proof needs the memory of its unrounded tables.
    return export_loaded(load(), name, repository, report, format_, prompts)


def export_loaded(
    loaded: LoadedSource,
    name: str,
    repository: Path,
    report: Report = lambda _: None,
    format_: TableFormat | None = None,
    soft_prompts: Mapping[str, Path] = MappingProxyType({}),
) -> ExportResult:
    """Export a loaded front-end, as `export` does. It stays in evaluation mode.

    Tables are stored in `format_`; default float32. `soft_prompts` are folders by name.
    """
    source = loaded.frontend
    source.eval()
    storage: dict[str, StoredTable] = {}
    try:
        if format_ and not isinstance(source, FrontEnd):
            raise ExportError(f"--dtype: got {format_.dtype!r}, expected only float32 for stems and custom modules")
        with draft(repository, name) as folder:
            loaded = write_soft_prompts(loaded, soft_prompts, folder)
            if isinstance(source, Stem):
                export_stem(source, folder, report)
            else:
                if isinstance(source, FrontEnd) and source.config.bias is not None:
                    export_bias(source.bias, folder)
                if isinstance(source, FrontEnd) and format_:
                    export_graph(shrink_tables(source), folder, report)
                    write_tables(source, format_, folder, report)
                    storage = compare_tables(source, format_, folder, report)
                    stored = read_stored(folder, source.config)
                    weights = {name: weight for name, weight in source.state_dict().items() if name not in stored}
                    data = FrontEndData(source.config, {name: weight.numpy() for name, weight in weights.items()})
                    source = TorchReference.of(data, stored).frontend  # releases the unrounded tables
                    loaded = replace(loaded, frontend=source)
                elif isinstance(source, CustomFrontEnd):
                    export_custom(source, folder, report)
                else:
                    export_graph(source, folder, report)
            label_graphs(folder, source.signature)
            if loaded.tokenizer:
                shutil.copyfile(loaded.tokenizer, folder / TOKENIZER)
            manifest = describe_artifact(loaded, folder, report)
            write(manifest, folder / MANIFEST)
            check_graphs(folder, manifest)
            check_ngram_tables(folder, manifest)
            check_references(manifest, [Path("/")])
            proof: Prove = (
                partial(prove_stem_artifact, source)
                if isinstance(source, Stem)
                else partial(prove_artifact, TorchReference(source))
            )
            providers = {provider: proof(folder, provider, report) for provider in find_providers()}
            parity = ParityReport(providers=providers, storage=storage, discovery=loaded.discovery)
            write(parity, folder / PARITY)
            return ExportResult(repository / name / str(publish(folder)), manifest, parity)
    except OSError as error:
        raise ExportError(f"{error.filename or repository}: {error.strerror}") from error
    except ParityError as error:
        raise ParityError("; ".join(filter(None, (str(error), _find_non_finite(source))))) from error
    except PreblockError as error:
        raise ExportError(str(error)) from error


def _find_non_finite(module: nn.Module) -> str | None:
    """Return an error about the first weight with NaN or infinity, if there is one: no graph equals its module then."""
    for name, weight in module.named_parameters():
        finite = torch.isfinite(weight).flatten(1).all(1) if weight.ndim > 1 else torch.isfinite(weight)
        if not finite.all():
            row = int(finite.long().argmin())
            place = "row" if weight.ndim > 1 else "element"
            return f"{name}: got NaN or infinity in {place} {row}, expected finite numbers"
    return None


def export_module(
    module: nn.Module,
    name: str,
    repository: str | Path,
    *,
    vocab_size: int | None = None,
    max_len: int | None = None,
    exact: bool = False,
) -> ExportResult:
    """Export a module as the next version of `name` in `repository`, and prove its graph equal to it.

    A module of `preblock.models` is described in the artifact, so `verify` can repeat the proof. The artifact of
    any other module does not describe it, so `verify` checks its hashes alone. The training modes stay as they are.

    Args:
        module: a `FrontEnd` or a stem; or any other module, as in `CustomFrontEnd`.
        name: name of the model.
        repository: folder of the models; created if missing.
        vocab_size: legal ids are 0 to V - 1; only for other modules, and required for them.
        max_len: the largest legal offset + tokens; only for other modules, and required for them.
        exact: whether the graph must equal another module bit for bit; default False.

    Raises:
        ExportError: the module returns no vectors, the graph is not equal to it, an argument is missing or needless,
            or a file cannot be written.

    """
    given: object = module
    if not isinstance(given, nn.Module):
        got = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise ExportError(f"module: got {got}, expected an instance of torch.nn.Module")
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        frontend = _custom(module, vocab_size, max_len, exact)
        return export_loaded(LoadedSource(frontend, Source(kind="module")), name, Path(repository))
    except ValueError as error:
        raise ExportError(str(error)) from error
    finally:
        for part, training in modes:
            part.training = training


def _custom(module: nn.Module, vocab_size: int | None, max_len: int | None, exact: bool) -> AnyFrontEnd:
    """Return a module of `preblock.models` unchanged, and any other one as a custom front-end."""
    given = {"vocab_size": vocab_size, "max_len": max_len, "exact": exact or None}
    if isinstance(module, FrontEnd | Stem):
        for argument, value in given.items():
            if value is not None:
                kind = type(module).__name__
                raise ExportError(f"{argument}: got {value}, expected nothing, because a {kind} has its own")
        for name, weight in module.named_parameters():
            if weight.dtype != torch.float32 or weight.device.type != "cpu":
                got = f"{weight.dtype} on {weight.device}"
                raise ExportError(f"{name}: got {got}, expected torch.float32 on cpu; module.float().cpu() converts it")
        if isinstance(module, FrontEnd):
            check_described(module)
        return module
    if vocab_size is None or max_len is None:
        missing = "vocab_size" if vocab_size is None else "max_len"
        raise ExportError(
            f"{missing}: got nothing, expected a number, because a {type(module).__name__} does not state it"
        )
    return CustomFrontEnd(module, vocab_size, max_len, exact)


def _change_rotary(loaded: LoadedSource, option: str, **change: Any) -> LoadedSource:
    """Return the source with another form or dtype of its rotary outputs, as `option` requests."""
    source = loaded.frontend
    if not isinstance(source, FrontEnd) or not source.config.rotary:
        reason = (isinstance(source, FrontEnd) and source.config.no_rotary) or "this front-end leaves none to attention"
        (got,) = change.values()
        raise ExportError(f"{option}: got {got}, but the model has no rotary outputs: {reason}")
    try:
        rotary = tuple(replace(output, **change) for output in source.config.rotary)
    except ValueError as error:
        raise ExportError(f"{option}: {error}") from error
    config = replace(source.config, rotary=rotary)
    return replace(loaded, frontend=FrontEnd.from_tensors(config, source.state_dict()))


def _resize(loaded: LoadedSource, max_len: int, resizing: str | None) -> LoadedSource:
    if not isinstance(loaded.frontend, FrontEnd):
        raise ExportError("--max-len is only for front-ends of token ids; the source takes images or spectrograms")
    try:
        frontend = resize_positions(loaded.frontend, max_len, resizing)
    except ValueError as error:
        raise ExportError(f"--max-len and --resize: {error}") from error
    record = Resized(from_max_len=loaded.frontend.signature.max_len, method=resizing)
    return replace(loaded, frontend=frontend, resized=record)
