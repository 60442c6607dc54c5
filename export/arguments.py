"""The arguments of an export, checked before weights are read: name, source, and options that exclude each other."""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypedDict

from preblock.export.errors import ExportError
from preblock.export.publication import check_name
from preblock.models.checkpoints.family_lookup import family_of, is_stem, known
from preblock.models.checkpoints.other_names import describe_model_folder, describe_other_weights
from preblock.models.checkpoints.static_reader import CONFIG, MODULES, SETTINGS, find_static
from preblock.models.checkpoints.weight_files import CheckpointError, read_json
from preblock.models.frontend_file import DESCRIPTION, INDEX
from preblock.models.presets import PRESETS
from preblock.service.artifacts.manifest import Source
from preblock.service.artifacts.names import MANIFEST, TOKENIZER

HUB = re.compile(r"hf:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+(?:@[\w./-]+)?")
"""A source of the hub without its prefix."""
MIN_SIMILARITY = 0.5
"""Least similarity of a suggestion, from 0 to 1: `gpt2` suggests `gpt2-small`."""

ADAPTER = "adapter_config.json"
"""File of an adapter of PEFT."""
SMALL_FILES = (CONFIG, DESCRIPTION, INDEX, MODULES, SETTINGS, TOKENIZER, ADAPTER)
"""Files that an export looks for beside those of weights. They name these, except for the tokenizer, to be copied, and
an adapter."""
DEFAULTS: tuple[object, ...] = (None, False, "float32", "full", [])
"""Values of the options of an export that nobody gave."""

Format = Literal["description", "static", "stem", "checkpoint", "discovery"]


class SourceOptions(TypedDict, total=False):
    """Choices left open by a published checkpoint, as in `read_frontend`; `tokens_only` for its token table alone.

    `reference` leaves n-gram tables in the files of the checkpoint. `tokenizer` allows other ids than in transformers.
    """

    side: str | None
    arithmetic: Literal["float32", "source"]
    segments: bool
    rotary_length: int | None
    tokens_only: bool
    reference: bool
    tokenizer: Literal["ignore-conflicts"] | None


def check_arguments(
    source: str,
    name: str,
    choices: SourceOptions,
    max_len: int | None = None,
    resizing: str | None = None,
    dtype: str = "float32",
    scale: str | None = None,
) -> None:
    """Check the arguments of `export`, reading at most `config.json` of a folder.

    Raises:
        ExportError: an argument is wrong, or two exclude each other; the message names it.

    """
    check_name(name)
    check_scale(dtype, scale)
    if resizing is not None and max_len is None:
        raise ExportError("--resize needs --max-len, the new limit of the positions")
    if choices.get("reference") and choices.get("tokens_only"):
        raise ExportError("--reference is for n-gram tables, and --tokens-only leaves them out; give one of the two")
    record = parse_source(source)
    if record.kind == "preset":
        refuse_choices(source, choices)
    elif record.kind == "folder" and detect_format(Path(source), choices) == "stem":
        if max_len is not None:
            raise ExportError("--max-len is only for front-ends of token ids; the source takes images or spectrograms")
        if dtype != "float32":
            raise ExportError(f"--dtype {dtype} is only for front-ends of token ids; a stem is stored as float32")


def check_scale(dtype: str, scale: str | None) -> None:
    """Raise ExportError for `--scale` without `--dtype int8`."""
    if scale is not None and dtype != "int8":
        raise ExportError(f"--scale is only for --dtype int8; the dtype is {dtype}")


def parse_source(source: str) -> Source:
    """Return the kind of `source`, and its name and revision in the hub: a folder, a preset, or `hf:owner/name`.

    Raises:
        ExportError: `source` is none of these; the message suggests the nearest.

    """
    # An empty name would be the working folder.
    if source and _is_folder(source):
        return Source(kind="folder")
    if source in PRESETS:
        return Source(kind="preset", name=source)
    if match := HUB.fullmatch(source):
        return Source(kind="hub", name=match["name"], revision=match["revision"])
    raise ExportError(f"SOURCE: {_explain(source)}")


def default_name(source: str) -> str:
    """Return a name for the model from `source`: of the preset, the folder, or the repository of the hub.

    Characters that no name may have become hyphens.

    Raises:
        ExportError: `source` is unknown, or its name has no letter and no digit.

    """
    record = parse_source(source)
    stated = Path(source).resolve().name if record.kind == "folder" else str(record.name).rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stated).lstrip("._-")[:128]
    if not name:
        raise ExportError(f"--name is needed: the name of the source, {stated!r}, has no letter and no digit")
    return name


def detect_format(folder: Path, choices: SourceOptions) -> Format:
    """Return the format of the front-end in `folder`, from `frontend.toml`, `config.json` or `modules.json` alone.

    Raises:
        ExportError: `folder` has none of these files, or an adapter beside them; its model type is unknown, or it
            allows none of `choices`.

    """
    if os.path.lexists(folder / DESCRIPTION):
        refuse_choices(DESCRIPTION, choices)
        return "description"
    try:
        if find_static(folder):
            refuse_choices("a static embedding model", choices)
            return "static"
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    _check_adapter(folder)
    if not os.path.lexists(folder / CONFIG):
        hint = "; it is an exported artifact already, ready for `preblock serve`" if _is_artifact(folder) else ""
        found = describe_other_weights(folder)
        hint = hint or describe_model_folder(folder, CONFIG) or (found and f", {found}")
        raise ExportError(f"{folder}: the folder holds neither {CONFIG} nor {DESCRIPTION}{hint}")
    side = choices.get("side")
    try:
        if is_stem(folder, side):
            refuse_choices("a stem", {name: value for name, value in choices.items() if name != "side"})
            return "stem"
        document = read_json(folder / CONFIG)
        if _needs_discovery(document):
            fixed = {name: value for name, value in choices.items() if name not in ("side", "tokens_only", "tokenizer")}
            refuse_choices(repr(document["model_type"]), fixed, "model types with a row in the family table")
            return "discovery"
        family_of(document, side, choices.get("segments", False))
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    return "checkpoint"


def _check_adapter(folder: Path) -> None:
    """Raise ExportError for an adapter of PEFT: transformers would load it into the model."""
    if os.path.lexists(folder / ADAPTER):
        raise ExportError(
            f"{folder}: {ADAPTER} belongs to an adapter of PEFT, expected a whole model; "
            "merge it into its model with merge_and_unload(), save the result into another folder, and export this one"
        )


def _needs_discovery(document: Mapping[str, Any]) -> bool:
    """Return whether the model type has no row in the family table, and transformers is installed to discover it."""
    model_type = document.get("model_type")
    named = isinstance(model_type, str) and "/" not in model_type
    return named and model_type not in known() and find_spec("transformers") is not None


def _is_folder(source: str) -> bool:
    try:
        return Path(source).is_dir()
    except OSError as error:
        raise ExportError(f"{source}: {(error.strerror or 'unreadable').lower()}") from error


def _explain(source: str) -> str:
    """Return what is wrong with a source that is no folder, no preset and no repository, and the nearest right one."""
    if not source:
        return "the text is empty; name a folder, a preset, or hf:owner/name"
    if Path(source).exists():
        return f"{source} is a file; name its folder, which holds {CONFIG} or {DESCRIPTION}"
    if source.startswith("hf:"):
        return f"{source!r} names no repository of the hub; write hf:owner/name or hf:owner/name@revision"
    if REPOSITORY.fullmatch(source):
        return f"no folder {source} exists; to download it from the hub, prefix it with hf:, as in hf:{source}"
    if "/" in source:
        return f"no folder {source} exists"
    close = get_close_matches(source.lower(), PRESETS, 1, MIN_SIMILARITY)
    hint = f"did you mean {close[0]}?" if close else f"known presets: {', '.join(PRESETS)}"
    return f"{source!r} is neither a folder nor a preset; {hint}"


def _is_artifact(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or any(folder.glob(f"[1-9]*/{MANIFEST}"))


def refuse_choices(source: str, choices: Mapping[str, Any], allowed: str = "published checkpoints") -> None:
    """Raise ExportError for choices allowed only with `allowed`."""
    for name, value in choices.items():
        if value not in DEFAULTS:
            option = name.replace("_", "-")
            raise ExportError(f"--{option} is only for {allowed}; {source} is none")
