"""Removes published artifacts. A reader sees a complete artifact or none."""

import errno
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from preblock.export.errors import ExportError
from preblock.export.layouts.triton import update_config
from preblock.export.publication import hidden, sweep
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.names import MANIFEST, PARITY
from preblock.service.core.errors import ArtifactError


def check_removable(folder: Path) -> None:
    """Check for an artifact in `folder`, and for no other file. The draft of a killed `verify` is removed.

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
    sweep(folder)
    for name in sorted(entry.name for entry in folder.iterdir()):
        if name not in (MANIFEST, PARITY, *files):
            raise ExportError(f"{folder} holds {name}, which is no file of the artifact, and stays")


def withdraw(folders: Sequence[Path]) -> None:
    """Remove the artifacts in `folders`, versions of one model, and the folder of a model without further versions.

    They disappear before their files are deleted. An error before restores them all. A killed removal leaves drafts;
    the next export of the model removes them.

    Raises:
        ExportError: a file cannot be written or removed.
        ArtifactError: another version is damaged, which the configuration of Triton describes.

    """
    parent = folders[0].parent
    try:
        for folder in folders:
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        with ExitStack() as stack:
            for folder in folders:
                stack.enter_context(hidden(folder))
            update_config(parent)
    except OSError as error:
        raise ExportError(f"{error.filename or parent}: {error.strerror}") from error
    with suppress(OSError):  # holds another version, or the draft of an export
        parent.rmdir()
