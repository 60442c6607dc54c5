"""The origin of an artifact: the record of its source and options in the manifest, and the comparison of a source."""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path
from typing import Any

from preblock import __version__
from preblock.export.errors import ExportError
from preblock.export.options import SMALL_FILES, ResolvedSource
from preblock.export.progress import Report, StepProgress
from preblock.export.publication import versions
from preblock.models.checkpoints.weight_files import CheckpointError, check_file
from preblock.models.frontend_file import WEIGHTS
from preblock.service.artifacts.checksums import Checksums
from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Source
from preblock.service.core.errors import ArtifactError

SOUGHT_FILES = (*SMALL_FILES, WEIGHTS)
"""Files that an export looks for in a folder. A new one among them may change the artifact."""
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_TIMEOUT_SECONDS = 10.0
FIRST_SERVER_ERROR = 500
"""The lowest HTTP status for a failure of the hub itself."""


@dataclass(frozen=True)
class SameExport:
    """The newest version of a model, an export of the same source; `warning` says what could not be checked."""

    version: int
    warning: str = ""


def hash_source(source: ResolvedSource, report: Report) -> dict[str, str]:
    """Return the SHA-256 of each file that an export of the folder reads or looks for, by its name.

    Empty for another kind of source, and for a folder whose files cannot be read: the export says why.
    """
    if source.format is None:
        return {}
    from preblock.export.source import weight_files

    folder = Path(source.text)
    with suppress(ExportError, CheckpointError, OSError):
        names = [name for name in SOUGHT_FILES if os.path.lexists(folder / name)]
        names = sorted({*names, *weight_files(folder, source.format, source.options)})
        progress = _progress(folder, names, report)
        return {name: _hash(folder / name, progress.sha256) for name in names}
    return {}


def find_same(source: ResolvedSource, repository: Path, report: Report, cache: Path | None) -> SameExport | None:
    """Return the newest version of the model in `repository` if it is an export of `source` as it is now; else None.

    It is the same if this release exported it with default options from the same preset, from the same commit of the
    hub, or from a folder with the same files; and a discovered one with the same release of the library. Older versions
    do not count: the service answers with the newest one.

    Args:
        source: the source, with default options.
        repository: folder of the models.
        report: receives the progress of hashing.
        cache: folder of the hashes that earlier runs computed; None for none.

    Raises:
        ExportError: the manifest of the newest version cannot be read.

    """
    asked, version = source.record, max(versions(repository / source.name), default=0)
    if not version:
        return None
    folder = repository / source.name / str(version)
    try:
        manifest = read_manifest(folder)
    except ArtifactError as error:
        raise ExportError(f"{folder}: {error}") from error
    stored = manifest.source
    same = (stored.kind, stored.name) == (asked.kind, asked.name)
    if not same or stored.options or manifest.versions.get("preblock") != __version__:
        return None
    if stored.discovered_with and not _is_installed(stored.discovered_with):
        return None
    if asked.kind == "folder":
        return SameExport(version) if _has_files(Path(source.text), stored.files, report, cache) else None
    return SameExport(version) if asked.kind == "preset" else _compare_commits(asked, stored, version)


def _is_installed(library: str) -> bool:
    """Return whether no other version of a library is installed; `library` is its name and its version."""
    name, _, version = library.partition(" ")
    return find_spec(name) is None or metadata.version(name) == version


def _has_files(folder: Path, files: Mapping[str, str], report: Report, cache: Path | None) -> bool:
    """Return whether `folder` has the files with these hashes, and no further one that an export looks for."""
    if not files or any(os.path.lexists(folder / name) and name not in files for name in SOUGHT_FILES):
        return False
    checksums = Checksums(cache)
    progress = _progress(folder, files, report)
    try:
        return all(
            _hash(folder / name, lambda stream: checksums.sha256(stream, progress.sha256)) == expected
            for name, expected in files.items()
        )
    except (CheckpointError, OSError):
        return False  # the export says why
    finally:
        checksums.save()


def _progress(folder: Path, names: Any, report: Report) -> StepProgress:
    total = sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
    return StepProgress(report, f"hashing {folder}", total)


def _hash(file: Path, digest: Callable[[BufferedReader], str]) -> str:
    check_file(file)  # first: opening a pipe would wait for its writer
    with file.open("rb") as stream:
        return digest(stream)


def _compare_commits(asked: Source, stored: Source, version: int) -> SameExport | None:
    """Return `version` if the hub has the stored commit at the asked revision, or if it cannot say so."""
    revision = asked.revision
    if revision and COMMIT.fullmatch(revision):
        return SameExport(version) if stored.revision == revision else None
    # Imported here, because no other source needs it.
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        found = HfApi().model_info(str(asked.name), revision=revision, timeout=HUB_TIMEOUT_SECONDS).sha
        return SameExport(version) if stored.revision == found else None
    except HFValidationError:
        return None  # the export says what is wrong
    except Exception as error:  # those of the connection belong to another HTTP client in each release of the hub's
        if isinstance(error, HfHubHTTPError) and error.response.status_code < FIRST_SERVER_ERROR:
            return None  # the export says what the hub refuses
        known = _find_cached(str(asked.name), revision)
        if known != stored.revision and (known or revision):
            return None  # an export from the cache of the hub; without the files there, it says what is missing
        reason = " ".join(str(error).split()) or type(error).__name__
        return SameExport(version, f"the hub cannot be asked for a newer commit than {stored.revision}: {reason}")


def _find_cached(name: str, revision: str | None) -> str | None:
    """Return the commit that `revision` had when the hub was last asked; None if its cache does not know."""
    from huggingface_hub import try_to_load_from_cache

    for file in SOUGHT_FILES:
        found = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            return Path(found).parent.name
    return None
