"""Where a front-end comes from: a folder, a preset, or a repository of a hub. Nothing is guessed."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from incipit.export.errors import ExportError
from incipit.models.checkpoint import INDEX, WEIGHTS, CheckpointError, read_frontend
from incipit.models.custom import CustomFrontEnd
from incipit.models.description import DESCRIPTION, read_description
from incipit.models.frontend import FrontEnd
from incipit.models.presets import PRESETS, build_preset
from incipit.service import manifest
from incipit.service.manifest import TOKENIZER

HUB = re.compile(r"hf:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
HUB_FILES = ["config.json", DESCRIPTION, WEIGHTS, INDEX, "model-*-of-*.safetensors", TOKENIZER]


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
    rotary_length: int | None = None,
) -> LoadedSource:
    """Load the front-end that `source` names: an existing folder, a preset, or `hf:owner/name[@revision]`.

    `side` chooses "encoder" or "decoder" of a checkpoint that has both, `arithmetic` the rounding of its steps,
    `rotary_length` the length that its rotary outputs are made for, as in `read_frontend`.

    Raises:
        ExportError: it names none of these, or cannot be read.

    """
    # Without a name it would be the working folder.
    if source and Path(source).is_dir():
        return _load_folder(Path(source), manifest.Source(kind="folder"), side, arithmetic, rotary_length)
    if source in PRESETS:
        _refuse_choices(source, side, arithmetic, rotary_length)
        record = manifest.Source(kind="preset", name=source)
        return LoadedSource(build_preset(source), record)
    if match := HUB.fullmatch(source):
        folder = _download(match["name"], match["revision"])
        # The hub's cache names the folder of a snapshot by its commit.
        record = manifest.Source(kind="hub", name=match["name"], revision=folder.name)
        return _load_folder(folder, record, side, arithmetic, rotary_length)
    raise ExportError(
        f"SOURCE: got {source!r}, allowed an existing folder, a preset ({', '.join(PRESETS)}), "
        "or hf:owner/name[@revision]"
    )


def _load_folder(
    folder: Path,
    record: manifest.Source,
    side: str | None,
    arithmetic: Literal["float32", "source"],
    rotary_length: int | None,
) -> LoadedSource:
    described = (folder / DESCRIPTION).is_file()
    if described:
        _refuse_choices(DESCRIPTION, side, arithmetic, rotary_length)
    try:
        frontend = read_description(folder) if described else read_frontend(folder, side, arithmetic, rotary_length)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    config = folder / (DESCRIPTION if described else "config.json")
    record = record.model_copy(update={"config_sha256": manifest.describe(config).sha256})
    tokenizer = folder / TOKENIZER
    return LoadedSource(frontend, record, tokenizer if tokenizer.is_file() else None)


def _refuse_choices(source: str, side: str | None, arithmetic: str, rotary_length: int | None) -> None:
    """Raise ExportError for choices that only a published checkpoint leaves open."""
    if side is not None:
        raise ExportError(f"--side: got {side!r}, allowed only for models that have sides; {source} has none")
    if arithmetic != "float32":
        raise ExportError(f"--arithmetic: got {arithmetic!r}, allowed float32 for {source}")
    if rotary_length is not None:
        raise ExportError(f"--rotary-length: got {rotary_length}, allowed only for a published checkpoint")


def _download(name: str, revision: str | None) -> Path:
    """Download what a front-end needs of a repository, and return the snapshot's folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f"@{revision}" if revision else ""
        raise ExportError(f"hf:{name}{at}: {' '.join(str(error).split())}") from error
