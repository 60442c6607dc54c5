"""Soft prompts of an export: one more table of the artifact."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from preblock.export.errors import ExportError
from preblock.export.source import LoadedSource
from preblock.models.checkpoints.soft_prompt_reader import read_soft_prompt
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.config import FrontEndConfig
from preblock.service.artifacts.manifest import SoftPrompt
from preblock.service.artifacts.names import SOFT_PROMPTS

OPTION = "--soft-prompt"


def write_soft_prompts(loaded: LoadedSource, folders: Mapping[str, Path], folder: Path) -> LoadedSource:
    """Write the table of all soft prompts into the artifact in `folder`, and return the source with their records.

    Raises:
        ExportError: the model has no known token vectors, or a folder holds no soft prompt for them.

    """
    if not folders:
        return loaded
    config = getattr(loaded.frontend, "config", None)
    if not isinstance(config, FrontEndConfig):
        raise ExportError(f"{OPTION}: got a soft prompt, but the token vectors of this model are unknown")
    width, records, tables, first = config.signature.lookup_width or config.signature.width, {}, [], 0
    for name, origin in folders.items():
        try:
            table = read_soft_prompt(origin, width)
        except CheckpointError as error:
            raise ExportError(f"{OPTION} {name}: {error}") from error
        records[name] = SoftPrompt(first=first, rows=len(table))
        tables.append(table)
        first += len(table)
    (folder / SOFT_PROMPTS).write_bytes(np.concatenate(tables).astype("<f4").tobytes())
    return replace(loaded, soft_prompts=records)
