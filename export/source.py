"""Sources of a front-end: a folder, a preset, or a repository of the hub. Nothing is guessed."""

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from preblock.export.errors import ExportError
from preblock.export.progress import Report, StepProgress
from preblock.models.checkpoints.families import known
from preblock.models.checkpoints.reader import files_needed, read_frontend
from preblock.models.checkpoints.stem_reader import is_stem, read_stem, stem_files_needed
from preblock.models.checkpoints.token_table import keep_tokens
from preblock.models.checkpoints.toml_config import files_described, read_description
from preblock.models.checkpoints.weight_files import CheckpointError, read_json
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_file import DESCRIPTION, INDEX
from preblock.models.modules.stems import Stem
from preblock.models.presets import PRESETS, build_preset
from preblock.service.artifacts.io import describe
from preblock.service.artifacts.manifest import TOKENIZER
from preblock.service.artifacts.parity import OutputParity
from preblock.service.artifacts.records import Resized, Source

HUB = re.compile(r"hf:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
SMALL_FILES = ["config.json", DESCRIPTION, INDEX, TOKENIZER]
"""Files to download first. They name the weight files, except for the tokenizer, which is copied."""
FAMILY_TABLE = "model types with a row in the family table"


class SourceOptions(TypedDict, total=False):
    """Choices left open by a published checkpoint, as in `read_frontend`; `tokens_only` for its token table alone."""

    side: str | None
    arithmetic: Literal["float32", "source"]
    segments: bool
    rotary_length: int | None
    tokens_only: bool


AnyFrontEnd = FrontEnd | CustomFrontEnd | Stem


@dataclass(frozen=True)
class LoadedSource:
    """A front-end, its record for the manifest, and its tokenizer file if the source has one.

    `discovery` compares a discovered front-end with the library's model.
    """

    frontend: AnyFrontEnd
    record: Source
    tokenizer: Path | None = None
    resized: Resized | None = None
    discovery: OutputParity | None = None


def load_source(
    source: str, report: Report = lambda _: None, widen: bool = True, **choices: Unpack[SourceOptions]
) -> LoadedSource:
    """Load the front-end of `source`: an existing folder, a preset, or `hf:owner/name[@revision]`.

    `report` receives the progress of a long step. `widen` and `choices` are the arguments of `read_frontend`.

    Raises:
        ExportError: `source` is none of these, or cannot be read.

    """
    report(f"reading {source}")
    progress = StepProgress(report, f"reading {source}")
    # An empty name would be the working folder.
    if source and Path(source).is_dir():
        return _load_folder(Path(source), Source(kind="folder"), choices, progress, widen)
    if source in PRESETS:
        _refuse_choices(source, choices)
        record = Source(kind="preset", name=source)
        return LoadedSource(build_preset(source), record)
    if match := HUB.fullmatch(source):
        folder = _download(match["name"], match["revision"], choices)
        record = Source(kind="hub", name=match["name"], revision=folder.name)
        return _load_folder(folder, record, choices, progress, widen)
    raise ExportError(
        f"SOURCE: got {source!r}, expected an existing folder, a preset ({', '.join(PRESETS)}), "
        "or hf:owner/name[@revision]"
    )


def _load_folder(
    folder: Path, record: Source, choices: SourceOptions, progress: StepProgress, widen: bool
) -> LoadedSource:
    described = (folder / DESCRIPTION).is_file()
    if described:
        _refuse_choices(DESCRIPTION, choices)
    discovery: OutputParity | None = None
    tokens_only = choices.get("tokens_only", False)
    try:
        frontend: AnyFrontEnd
        if described:
            frontend = read_description(folder, progress.add, widen)
        elif is_stem(folder, choices.get("side")):
            _refuse_choices("a stem", _without_side(choices))
            frontend = read_stem(folder, choices.get("side"))
        elif _has_row(folder):
            further = {name: value for name, value in choices.items() if name != "tokens_only"}
            frontend = read_frontend(folder, **further, count_bytes=progress.add, widen=widen)  # type: ignore[arg-type]
            frontend = keep_tokens(frontend) if tokens_only else frontend
        else:
            # Imported here, because the export of a known family must not need transformers.
            from preblock.export.discovery.discovery import discover

            document = read_json(folder / "config.json")
            further = _without_side(choices) | {"tokens_only": None}
            _refuse_choices(repr(document["model_type"]), further, FAMILY_TABLE)
            found = discover(folder, document, choices.get("side"), progress.add, widen, tokens_only)
            frontend, discovery = found.frontend, found.parity
            copies = found.copies if found.copies > 1 else None
            record = record.model_copy(update={"discovered_with": found.library, "block_copies": copies})
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    config = folder / (DESCRIPTION if described else "config.json")
    record = record.model_copy(update={"config_sha256": describe(config).sha256})
    tokenizer = folder / TOKENIZER
    return LoadedSource(frontend, record, tokenizer if tokenizer.is_file() else None, discovery=discovery)


def _has_row(folder: Path) -> bool:
    """Return whether the family table knows the model type; True for a file without one, whose error it raises."""
    model_type = read_json(folder / "config.json").get("model_type")
    return not isinstance(model_type, str) or model_type in known()


def _without_side(choices: SourceOptions) -> dict[str, Any]:
    return {name: value for name, value in choices.items() if name != "side"}


def _refuse_choices(source: str, choices: Mapping[str, Any], allowed: str = "published checkpoints") -> None:
    """Raise ExportError for choices that the kind of source does not allow."""
    for name, value in choices.items():
        if value not in (None, False, "float32"):
            option = name.replace("_", "-")
            raise ExportError(f"--{option}: got {value!r}, expected only for {allowed}; {source} is none")


def _download(name: str, revision: str | None, choices: SourceOptions) -> Path:
    """Download the files of a front-end from a repository, and return the snapshot's folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=SMALL_FILES))
        described = (folder / DESCRIPTION).is_file()
        side = choices.get("side")
        if described:
            needed = files_described(folder)
        elif is_stem(folder, side):
            needed = stem_files_needed(folder, side)
        elif _has_row(folder):
            needed = files_needed(folder, side, choices.get("segments", False))
        else:
            from preblock.export.discovery.discovery import files_discovered

            document, tokens_only = read_json(folder / "config.json"), choices.get("tokens_only", False)
            needed = files_discovered(folder, document, side, tokens_only)
        # The hub's cache names the folder of a snapshot by its commit.
        snapshot_download(name, revision=folder.name, allow_patterns=[glob.escape(file) for file in needed])
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f"@{revision}" if revision else ""
        raise ExportError(f"hf:{name}{at}: {' '.join(str(error).split())}") from error
    return folder
