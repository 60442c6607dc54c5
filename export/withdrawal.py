"""Removes published artifacts. A reader sees a complete artifact or none."""

import json
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from preblock.export.errors import ExportError
from preblock.export.layouts.triton import CONFIG, write_config
from preblock.export.publication import DRAFT, versions
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import MANIFEST, PARITY
from preblock.service.core.errors import ArtifactError


def check_removable(folder: Path) -> None:
    """Check for an artifact in `folder`, and for no other file.

    Raises:
        ExportError: it is a link, holds no readable manifest, or holds a file outside the manifest.

    """
    if folder.is_symlink():
        raise ExportError(f"{folder} is a link, not an artifact; remove the link yourself")
    try:
        read_manifest(folder)
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
    except ArtifactError as error:
        raise ExportError(f"{folder} is not an artifact, and stays: {error}") from error
    for name in sorted(entry.name for entry in folder.iterdir()):
        if name not in (MANIFEST, PARITY, *files):
            raise ExportError(f"{folder} holds {name}, which is no file of the artifact, and stays")


def withdraw(folder: Path) -> None:
    """Remove the artifact in `folder`, and the folder of a model without further versions.

    An interrupted removal leaves a draft; the next export of the model removes it.

    Raises:
        ExportError: a file cannot be removed.

    """
    parent = folder.parent
    hidden = parent / f"{DRAFT}{secrets.token_hex(8)}"
    try:
        folder.rename(hidden)
        shutil.rmtree(hidden)
        if (parent / CONFIG).is_file():
            if versions(parent):
                write_config(parent)
            else:
                (parent / CONFIG).unlink()
    except OSError as error:
        raise ExportError(f"{error.filename or folder}: {error.strerror}") from error
    with suppress(OSError):  # holds another version, or the draft of an export
        parent.rmdir()
