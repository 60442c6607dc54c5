"""The artifacts in the folder of a model repository: `<repository>/<name>/<version>/`."""

import errno
import logging
import re
import stat
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from preblock.service.artifacts.names import NAME
from preblock.service.core.errors import ArtifactError
from preblock.service.core.files import SCARCE

LOG = logging.getLogger(__name__)
VERSION = re.compile(r"[1-9][0-9]{0,8}")


def find_artifacts(
    root: Path, known: Collection[tuple[str, int]] = (), may_be_empty: bool = False
) -> list[tuple[str, int, Path]]:
    """Return name, version and folder of every artifact in `root`, by name and version.

    A model folder without permission to read, or with a wrong name, is logged once and skipped.

    Args:
        root: the repository.
        known: names and versions of earlier artifacts. They are kept if their model folder cannot be read.
        may_be_empty: whether `root` may be without an artifact.

    Raises:
        ArtifactError: `root` does not exist, is no folder, cannot be read, or has no artifact.
        OSError: the process lacks descriptors or memory.

    """
    try:
        folders = list(root.iterdir())
    except FileNotFoundError as error:
        message = f"the repository {root} does not exist; `preblock export` makes one"
        raise ArtifactError("repository", str(root), "an existing folder", message=message) from error
    except NotADirectoryError as error:
        file = next(place for place in (root, *root.parents) if place.exists())
        message = f"the repository {root} is no folder: {file} is a file"
        raise ArtifactError("repository", str(root), "a folder", message=message) from error
    except OSError as error:
        message = f"the repository {root} cannot be read: {_reason(error)}"
        raise ArtifactError("repository", str(root), "a readable folder", message=message) from error
    found = [
        (folder.name, version, folder / str(version))
        for folder in folders
        if not folder.name.startswith(".")
        for version in _find_versions(folder, [version for name, version in known if name == folder.name])
    ]
    if not found and not may_be_empty:
        message = f"the repository {root} holds no model; `preblock export` adds one"
        raise ArtifactError("repository", str(root), "a folder with a model", message=message)
    return sorted(found)


def _find_versions(folder: Path, known: list[int]) -> list[int]:
    """Return the versions of a model folder; `known` if it cannot be read."""
    place, is_named = repr(str(folder)), re.fullmatch(NAME, folder.name) is not None
    try:
        versions = [int(version.name) for version in folder.iterdir() if _is_version(version)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = _reason(error)
        if is_named:  # not such as lost+found
            _warn_once(f"the model folder {place} cannot be read: {reason}")
        return known
    if versions and not is_named:
        _warn_once(f"the model folder {place} is skipped: its name may have only letters, digits, '.', '_' and '-'")
        return []
    return versions


def _is_version(folder: Path) -> bool:
    try:
        return VERSION.fullmatch(folder.name) is not None and stat.S_ISDIR(folder.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # without permission it is a version: the opening names the reason
        return error.errno != errno.ELOOP


def _reason(error: OSError) -> str:
    """Return the reason for an unreadable folder. Raise the error again if the same call may succeed later."""
    if error.errno in SCARCE:
        raise error
    return str(error.strerror).lower()


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    LOG.warning(text)
