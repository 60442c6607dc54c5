"""Sources of a front-end: a folder, a preset, or a repository of the hub. Nothing is guessed."""

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from preblock.export.errors import ExportError
from preblock.export.options import SMALL_FILES, ExportOptions, Format, ResolvedSource, detect_format
from preblock.export.progress import Report, StepProgress
from preblock.export.referenced_tables import ReferencedTables, reference_tables
from preblock.models.checkpoints.consumers import inputs_beside
from preblock.models.checkpoints.reader import files_needed, find_ngram_tables, read_frontend
from preblock.models.checkpoints.static_reader import (
    CONFIG,
    StaticLayout,
    find_static,
    read_static,
    static_files_needed,
)
from preblock.models.checkpoints.token_table import keep_tokens
from preblock.models.checkpoints.toml_config import files_described, read_description
from preblock.models.checkpoints.weight_files import (
    CheckpointError,
    describe_second_source,
    is_sharded,
    read_bytes,
    read_config,
)
from preblock.models.frontend_data import FrontEndData
from preblock.models.frontend_file import DESCRIPTION, WEIGHTS
from preblock.models.presets import preset_data
from preblock.models.torch_import import import_torch
from preblock.service.artifacts.io import describe
from preblock.service.artifacts.manifest import Resized, SentencePooling, SoftPrompt, Source
from preblock.service.artifacts.names import TOKENIZER
from preblock.service.artifacts.parity import OutputParity, TokenizerConflict
from preblock.service.core.errors import PreblockError
from preblock.service.runtime.tokenizer import check_tokenizer, parse_tokenizer

NEEDS_TORCH: Mapping[Format, str] = {
    "stem": "an image or audio stem",
    "discovery": "the discovery of a front-end",
}
"""The formats that need torch, in words."""

if TYPE_CHECKING:
    import tokenizers

    from preblock.models.custom_frontend import CustomFrontEnd
    from preblock.models.modules.stems import Stem

AnyFrontEnd: TypeAlias = Union[FrontEndData, "CustomFrontEnd", "Stem"]


@dataclass(frozen=True)
class LoadedSource:
    """A front-end, its record for the manifest, its tokenizer file if the source has one, and its soft prompts.

    `discovery` compares a discovered front-end with the library's model. `sentence` is the pooling of a static model.
    `tables` are those left in the files of the source. `beside` names inputs that belong to `inputs_embeds` and were
    left out. `conflicts` are those of the tokenizer with its folder. `warning` names
    files of weights that were left unread.
    """

    frontend: AnyFrontEnd
    record: Source
    tokenizer: Path | None = None
    resized: Resized | None = None
    discovery: OutputParity | None = None
    sentence: SentencePooling | None = None
    soft_prompts: Mapping[str, SoftPrompt] = field(default_factory=dict)
    tables: ReferencedTables = field(default_factory=ReferencedTables)
    beside: dict[str, str] = field(default_factory=dict)
    conflicts: tuple[TokenizerConflict, ...] = ()
    warning: str = ""


def load_source(source: ResolvedSource, report: Report = lambda _: None) -> LoadedSource:
    """Load the front-end of a source. A large table that is stored in another type than float32 stays as it is.

    `report` receives the progress of a long step.

    Raises:
        ExportError: the source cannot be read.

    """
    step = f"reading {source.text}"
    report(step)
    record, options = source.record, source.options
    if record.kind == "preset":
        return LoadedSource(preset_data(source.text), record)
    if source.format is not None:
        return _load_folder(Path(source.text), source.format, record, options, StepProgress(report, step))
    folder, format_ = _download(str(record.name), record.revision, options)
    record = record.model_copy(update={"revision": folder.name})
    return _load_folder(folder, format_, record, options, StepProgress(report, step))


def _load_folder(
    folder: Path, format_: Format, record: Source, options: ExportOptions, progress: StepProgress
) -> LoadedSource:
    _check_torch(format_)
    discovery: OutputParity | None = None
    tables, beside, widen = ReferencedTables(), dict[str, str](), options.dtype == "float32"
    try:
        layout = find_static(folder) if format_ == "static" else None
        if layout:
            return _load_static(folder, layout, record)
        frontend: FrontEndData | Stem
        if format_ == "description":
            frontend = read_description(folder, progress.add, widen)
        elif format_ == "stem":
            from preblock.models.checkpoints.stem_reader import read_stem

            frontend = read_stem(folder, options.side)
        elif format_ == "checkpoint":
            chosen = options.side, options.arithmetic, options.segments, options.rotary_length
            frontend = read_frontend(folder, *chosen, progress.add, widen, options.reference)
            if options.tokens_only:
                beside, frontend = inputs_beside(frontend.config), keep_tokens(frontend)
            if options.reference:
                tables = reference_tables(find_ngram_tables(folder, options.side), frontend)
        else:
            # Imported here, because the export of a known family must not need transformers.
            from preblock.export.discovery.discovery import discover

            found = discover(folder, read_config(folder), options.side, progress.add, widen, options.tokens_only)
            frontend, discovery, beside = found.frontend.data(), found.parity, found.beside
            record = record.model_copy(update={"discovered_with": found.library})
    except CheckpointError as error:
        raise ExportError("; ".join(filter(None, (str(error), describe_second_source(folder))))) from error
    config = folder / (DESCRIPTION if format_ == "description" else CONFIG)
    record = record.model_copy(update={"config_sha256": describe(config).sha256})
    file = folder / TOKENIZER
    loaded = LoadedSource(
        frontend, record, discovery=discovery, tables=tables, beside=beside, warning=describe_second_source(folder)
    )
    if not isinstance(frontend, FrontEndData) or not os.path.lexists(file):
        return loaded
    tokenizer = _open_tokenizer(file, frontend)
    conflicts = () if format_ == "description" else _check_folder(file, tokenizer, options.tokenizer)
    return replace(loaded, tokenizer=file, conflicts=conflicts)


def _check_folder(file: Path, tokenizer: "tokenizers.Tokenizer", choice: str | None) -> tuple[TokenizerConflict, ...]:
    """Return the conflicts of a tokenizer; raise ExportError for one of ordinary text, unless `choice` allows it."""
    # Imported here, because only published checkpoints need its tables of classes.
    from preblock.export.tokenizer_conflicts import find_conflicts

    conflicts = find_conflicts(file, tokenizer)
    ordinary = [conflict.summary() for conflict in conflicts if conflict.ordinary]
    if ordinary and choice is None:
        raise ExportError(
            f"{file}: ordinary text gets other ids than in transformers: {'; '.join(ordinary)}; let the files "
            "agree, or keep the ids of tokenizer.json with `preblock export --tokenizer ignore-conflicts`"
        )
    return conflicts


def _open_tokenizer(file: Path, frontend: FrontEndData) -> "tokenizers.Tokenizer":
    """Return the tokenizer in `file`; raise ExportError unless all its ids are rows of the token table."""
    try:
        tokenizer = parse_tokenizer(str(file), read_bytes(file))
        largest = check_tokenizer(str(file), tokenizer)
    except (CheckpointError, PreblockError) as error:
        raise ExportError(str(error)) from error
    if largest >= (rows := frontend.signature.vocab_size):
        raise ExportError(
            f"{file}: the tokenizer gives ids up to {largest}, but the largest row of the token table is {rows - 1}; "
            "remove the tokens beyond it, or the file to export without a tokenizer"
        )
    return tokenizer


def _load_static(folder: Path, layout: StaticLayout, record: Source) -> LoadedSource:
    model = read_static(folder, layout)
    tokenizer = folder / layout.tokenizer
    _open_tokenizer(tokenizer, model.frontend)
    return LoadedSource(
        model.frontend,
        record.model_copy(update={"config_sha256": describe(folder / layout.record).sha256}),
        tokenizer,
        sentence=SentencePooling(normalize=model.normalize, ignored_ids=model.ignored_ids),
    )


def _download(name: str, revision: str | None, options: ExportOptions) -> tuple[Path, Format]:
    """Download the files of a front-end from a repository, and return the snapshot's folder and its format."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES]))
        format_ = detect_format(folder, options)
        needed = weight_files(folder, format_, options)
        # The hub's cache names the folder of a snapshot by its commit.
        if needed and is_sharded(folder):  # a single file of weights wins over those of the index
            snapshot_download(name, revision=folder.name, allow_patterns=[WEIGHTS])
            needed = needed if is_sharded(folder) else weight_files(folder, format_, options)
        snapshot_download(name, revision=folder.name, allow_patterns=[glob.escape(file) for file in needed])
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f"@{revision}" if revision else ""
        raise ExportError(f"hf:{name}{at}: {' '.join(str(error).split())}") from error
    return folder, format_


def weight_files(folder: Path, format_: Format, options: ExportOptions) -> list[str]:
    """Return the names of the weight files that the front-end in `folder` needs; raise CheckpointError if unknown."""
    _check_torch(format_)
    layout = find_static(folder) if format_ == "static" else None
    if layout:
        return static_files_needed(layout)
    if format_ == "description":
        return files_described(folder)
    if format_ == "stem":
        from preblock.models.checkpoints.stem_reader import stem_files_needed

        return stem_files_needed(folder, options.side)
    if format_ == "checkpoint":
        return files_needed(folder, options.side, options.segments)
    from preblock.export.discovery.discovery import files_discovered

    return files_discovered(folder, read_config(folder), options.side, options.tokens_only)


def _check_torch(format_: Format) -> None:
    """Raise MissingTorchError if the format needs torch, and it is not installed."""
    if format_ in NEEDS_TORCH:
        import_torch(NEEDS_TORCH[format_])
