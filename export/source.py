"""Where a front-end comes from: a folder, a preset, or a repository of a hub. Nothing is guessed."""

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from incipit.export.errors import ExportError
from incipit.models.checkpoint import INDEX, CheckpointError, files_needed, read_frontend
from incipit.models.custom import CustomFrontEnd
from incipit.models.description import DESCRIPTION, files_described, read_description
from incipit.models.frontend import FrontEnd
from incipit.models.presets import PRESETS, build_preset
from incipit.service import manifest
from incipit.service.manifest import TOKENIZER

HUB = re.compile(r"hf:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
SMALL_FILES = ["config.json", DESCRIPTION, INDEX, TOKENIZER]
"""What says which other files are needed, and what is copied."""


@dataclass(frozen=True)
class LoadedSource:
    """A front-end, what to record of it, and the tokenizer file where the source has one."""

    frontend: FrontEnd | CustomFrontEnd
    record: manifest.Source
    tokenizer: Path | None = None
    resized: manifest.Resized | None = None


def load_source(
    source: str,
    side: str | None = None,
    arithmetic: Literal["float32", "source"] = "float32",
    segments: bool = False,
) -> LoadedSource:
    """Load the front-end that `source` names: an existing folder, a preset, or `hf:owner/name[@revision]`.

    `side`, `arithmetic` and `segments` are those of `read_frontend`.

    Raises:
        ExportError: it names none of these, or cannot be read.

    """
    # Without a name it would be the working folder.
    if source and Path(source).is_dir():
        return _load_folder(Path(source), side, arithmetic, segments, manifest.Source(kind="folder"))
    if source in PRESETS:
        _refuse_choices(source, side, arithmetic, segments)
        record = manifest.Source(kind="preset", name=source)
        return LoadedSource(build_preset(source), record)
    if match := HUB.fullmatch(source):
        folder = _download(match["name"], match["revision"], side, segments)
        record = manifest.Source(kind="hub", name=match["name"], revision=folder.name)
        return _load_folder(folder, side, arithmetic, segments, record)
    raise ExportError(
        f"SOURCE: got {source!r}, allowed an existing folder, a preset ({', '.join(PRESETS)}), "
        "or hf:owner/name[@revision]"
    )


def _load_folder(
    folder: Path,
    side: str | None,
    arithmetic: Literal["float32", "source"],
    segments: bool,
    record: manifest.Source,
) -> LoadedSource:
    described = (folder / DESCRIPTION).is_file()
    if described:
        _refuse_choices(DESCRIPTION, side, arithmetic, segments)
    try:
        frontend = read_description(folder) if described else read_frontend(folder, side, arithmetic, segments)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    config = folder / (DESCRIPTION if described else "config.json")
    record = record.model_copy(update={"config_sha256": manifest.describe(config).sha256})
    tokenizer = folder / TOKENIZER
    return LoadedSource(frontend, record, tokenizer if tokenizer.is_file() else None)


def _refuse_choices(source: str, side: str | None, arithmetic: str, segments: bool) -> None:
    """Raise ExportError for choices that only a published checkpoint leaves open."""
    if side is not None:
        raise ExportError(f"--side: got {side!r}, allowed only for models that have sides; {source} has none")
    if arithmetic != "float32":
        raise ExportError(f"--arithmetic: got {arithmetic!r}, allowed float32 for {source}")
    if segments:
        raise ExportError(f"--segments: allowed only for a published checkpoint; {source} says its own steps")


def _download(name: str, revision: str | None, side: str | None, segments: bool) -> Path:
    """Download what a front-end needs of a repository, and return the snapshot's folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=SMALL_FILES))
        described = (folder / DESCRIPTION).is_file()
        needed = files_described(folder) if described else files_needed(folder, side, segments)
        # The hub's cache names the folder of a snapshot by its commit.
        snapshot_download(name, revision=folder.name, allow_patterns=[glob.escape(file) for file in needed])
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f"@{revision}" if revision else ""
        raise ExportError(f"hf:{name}{at}: {' '.join(str(error).split())}") from error
    return folder
