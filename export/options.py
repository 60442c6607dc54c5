"""The options of an export, checked with its source before weights are read."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from preblock.export.errors import ExportError
from preblock.export.publication import check_name
from preblock.models.checkpoints.family_lookup import family_of, is_stem, known
from preblock.models.checkpoints.other_names import describe_model_folder, describe_other_weights
from preblock.models.checkpoints.static_reader import CONFIG, MODULES, SETTINGS, find_static
from preblock.models.checkpoints.weight_files import CheckpointError, read_json
from preblock.models.frontend_file import DESCRIPTION, INDEX
from preblock.models.presets import PRESETS
from preblock.service.artifacts.manifest import Source
from preblock.service.artifacts.names import MANIFEST, NAME, TOKENIZER

HUB = re.compile(r"hf:(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+(?:@[\w./-]+)?")
"""A source of the hub without its prefix."""
MIN_SIMILARITY = 0.5
"""Least similarity of a suggestion, from 0 to 1: `gpt2` suggests `gpt2-small`."""

ADAPTER = "adapter_config.json"
"""File of an adapter of PEFT."""
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files beside `tokenizer.json` that transformers reads."""
SMALL_FILES = (CONFIG, DESCRIPTION, INDEX, MODULES, SETTINGS, TOKENIZER, *TOKENIZER_SETTINGS, ADAPTER)
"""Files that an export looks for beside those of weights. They name these, except for the tokenizer, to be copied, its
settings, and an adapter."""
LEFT_OUT: Mapping[str, str] = {
    "reference": "n-gram tables",
    "segments": "segments",
    **dict.fromkeys(("rotary_length", "rotary_layout", "rotary_dtype"), "rotary outputs"),
}
"""Options for parts of a front-end beside its token table."""
ROW_OPTIONS = ("arithmetic", "segments", "rotary_length", "reference")
"""Options for choices that a model type with a row in the family table leaves open."""
CHECKPOINT_OPTIONS = ("side", "tokens_only", "tokenizer", *ROW_OPTIONS)
TOKEN_OPTIONS = ("max_len", "dtype", "rotary_layout", "rotary_dtype", "tokens_only", "tokenizer", *ROW_OPTIONS)
"""Options for front-ends of token ids."""

Format = Literal["description", "static", "stem", "checkpoint", "discovery"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of an export beside its source and name; the defaults are those of `preblock export`.

    Args:
        max_len: limit of offset + tokens; default the source's.
        resizing: method to resize a learned position table, as in `resize_positions`.
        dtype: stored type of the tables.
        scale: unit with one scale in int8, as in `find_format`.
        rotary_layout: columns of the rotary outputs, the `form` of `RotaryOutput`.
        rotary_dtype: type of the rotary outputs, the `dtype` of `RotaryOutput`.
        soft_prompts: `NAME=FOLDER` of each soft prompt, saved by PEFT.
        side: as in `read_frontend`, like the next three.
        arithmetic: type to round every step to.
        segments: whether to require segments that are token ids.
        rotary_length: tokens of the whole sequence.
        tokens_only: whether to export the token table alone.
        reference: whether to leave n-gram tables in the files of the checkpoint.

    Raises:
        ExportError: two options exclude each other, or one is not understood; the message names it.

    """

    max_len: int | None = None
    resizing: str | None = None
    dtype: str = "float32"
    scale: str | None = None
    rotary_layout: Literal["full", "half", "fused"] = "full"
    rotary_dtype: Literal["float32", "float16"] = "float32"
    soft_prompts: tuple[str, ...] = ()
    side: str | None = None
    arithmetic: Literal["float32", "source"] = "float32"
    segments: bool = False
    rotary_length: int | None = None
    tokens_only: bool = False
    reference: bool = False
    tokenizer: Literal["ignore-conflicts"] | None = None

    def __post_init__(self) -> None:
        """Check the options that need no source."""
        if self.scale is not None and self.dtype != "int8":
            raise ExportError(f"--scale is only for --dtype int8; the dtype is {self.dtype}")
        if self.resizing is not None and self.max_len is None:
            raise ExportError("--resize needs --max-len, the new limit of the positions")
        for name, part in LEFT_OUT.items():
            if self.tokens_only and name in self.given:
                option = f"--{name.replace('_', '-')}"
                raise ExportError(f"{option} is for {part}, and --tokens-only leaves them out; give one of the two")
        _ = self.prompts  # checks their names

    @cached_property
    def prompts(self) -> dict[str, Path]:
        """The folder of each soft prompt by its name; raise ExportError for a bad or repeated name."""
        found: dict[str, Path] = {}
        for item in self.soft_prompts:
            name, _, folder = item.partition("=")
            if not re.fullmatch(NAME, name) or not folder or name in found:
                raise ExportError(f"--soft-prompt: got {item!r}, expected NAME=FOLDER, each NAME once")
            found[name] = Path(folder)
        return found

    @property
    def given(self) -> dict[str, Any]:
        """The options other than the defaults, as the manifest records them: without paths of this machine."""
        values = vars(self) | {"soft_prompts": [*self.prompts]}
        return {
            option.name: values[option.name]
            for option in fields(self)
            if values[option.name] not in (option.default, [])
        }

    def refuse(
        self, source: str, allowed: str = "published checkpoints", names: Collection[str] = CHECKPOINT_OPTIONS
    ) -> None:
        """Raise ExportError for a given option among `names`, which only `allowed` sources have."""
        for name in self.given:
            if name in names:
                raise ExportError(f"--{name.replace('_', '-')} is only for {allowed}; {source} is none")


@dataclass(frozen=True)
class ResolvedSource:
    """A source as the user named it, its record for the manifest, the name of its model, and the options for it.

    `format` is that of a folder; None for a preset, and for a repository of the hub, whose files are yet unknown.
    """

    text: str
    record: Source
    name: str
    options: ExportOptions
    format: Format | None = None


def resolve(source: str, name: str | None = None, *, repository: Path | None = None, **options: Any) -> ResolvedSource:
    """Return the checked source of an export, reading at most `config.json` of a folder.

    Args:
        source: an existing folder, a preset, or `hf:owner/name[@revision]`.
        name: name of the model; default from the source.
        repository: its models are named by the message for an unknown source; default none.
        options: fields of `ExportOptions`.

    Raises:
        ExportError: an argument is wrong, or two exclude each other; the message names it.

    """
    chosen, record, format_ = ExportOptions(**options), parse_source(source, repository), None
    name = default_name(source) if name is None else name
    check_name(name)
    if record.kind == "preset":
        chosen.refuse(source)
    elif record.kind == "folder":
        format_ = detect_format(Path(source), chosen)
    return ResolvedSource(source, record, name, chosen, format_)


def parse_source(source: str, repository: Path | None = None) -> Source:
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
    raise ExportError(f"SOURCE: {_explain(source, repository)}")


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


def detect_format(folder: Path, options: ExportOptions) -> Format:
    """Return the format of the front-end in `folder`, from `frontend.toml`, `config.json` or `modules.json` alone.

    Raises:
        ExportError: `folder` has none of these files, or an adapter beside them; its model type is unknown, or it
            does not allow one of `options`.

    """
    if os.path.lexists(folder / DESCRIPTION):
        options.refuse(DESCRIPTION)
        return "description"
    try:
        if find_static(folder):
            options.refuse("a static embedding model")
            return "static"
        _check_whole_model(folder)
        document = read_json(folder / CONFIG)
        if is_stem(document, options.side):
            options.refuse("a stem", "front-ends of token ids", TOKEN_OPTIONS)
            return "stem"
        if _needs_discovery(document):
            allowed = "model types with a row in the family table"
            options.refuse(repr(document["model_type"]), allowed, ROW_OPTIONS)
            return "discovery"
        family_of(document, options.side, options.segments)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    except OSError as error:
        raise ExportError(f"{error.filename or folder}: {(error.strerror or 'unreadable').lower()}") from error
    return "checkpoint"


def _check_whole_model(folder: Path) -> None:
    """Raise ExportError for an adapter of PEFT, which transformers would load into its model, and without a config."""
    if os.path.lexists(folder / ADAPTER):
        raise ExportError(
            f"{folder}: {ADAPTER} belongs to an adapter of PEFT, expected a whole model; "
            "merge it into its model with merge_and_unload(), save the result into another folder, and export this one"
        )
    if not os.path.lexists(folder / CONFIG):
        hint = "; it is an exported artifact already, ready for `preblock serve`" if _is_artifact(folder) else ""
        found = describe_other_weights(folder)
        hint = hint or describe_model_folder(folder, CONFIG) or (found and f", {found}")
        raise ExportError(f"{folder}: the folder holds neither {CONFIG} nor {DESCRIPTION}{hint}")


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


def _explain(source: str, repository: Path | None) -> str:
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
    if repository is not None and _is_artifact(repository / source):
        return (
            f"{source!r} is neither a folder nor a preset; {repository} has a model of this name, which "
            "`preblock serve` without SOURCE serves"
        )
    close = get_close_matches(source.lower(), PRESETS, 1, MIN_SIMILARITY)
    hint = f"did you mean {close[0]}?" if close else f"known presets: {', '.join(PRESETS)}"
    return f"{source!r} is neither a folder nor a preset; {hint}"


def _is_artifact(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or any(folder.glob(f"[1-9]*/{MANIFEST}"))
