"""The state of the versions of a repository, and of their files."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from preblock.service.artifacts.io import read_manifest
from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import DATA, MANIFEST
from preblock.service.artifacts.references import read_signatures
from preblock.service.core.errors import ArtifactError, Unavailable
from preblock.service.core.files import SCARCE, FileSignature, signature_of, unreadable
from preblock.service.runtime.model import ServedModel, TokenModel

LOG = logging.getLogger(__name__)
Fingerprint = tuple[tuple[str, FileSignature], ...]
UNLOADED = "unloaded"
"""The reason of a version whose model is not loaded, or no longer."""
LACK = re.compile("bad_alloc|Failed to allocate memory|Cannot allocate memory|Too many open files")
"""Texts of onnxruntime's errors that may pass; it has no kind of exception for them."""


@dataclass(frozen=True)
class VersionState:
    """The state of a version folder: "READY", "LOADING", or "UNAVAILABLE" for a reason."""

    name: str
    version: int
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = ""


class VersionEntry(NamedTuple):
    """One version folder.

    Args:
        state: reported to callers.
        model: serves requests; None if the version is unavailable.
        seen: fingerprint of the last load attempt; None: load again at the next refresh.
        opened: fingerprint of `model`.
        error: of the last load attempt, or of a changed reference, if there was one.
        references: paths of files outside the artifact with rows of its tables.

    """

    state: VersionState
    model: ServedModel | None = None
    seen: Fingerprint | None = None
    opened: Fingerprint = ()
    error: ArtifactError | Unavailable | None = None
    references: tuple[str, ...] = ()

    @property
    def lost(self) -> bool:
        """Whether the version served once, and a referenced file has changed since."""
        return self.model is None and any(Path(name).is_absolute() for name, _ in self.opened)

    def check_references(self) -> "VersionEntry":
        """Return this entry; without its model if a referenced file has changed."""
        opened, now = dict(self.opened), read_signatures(self.references)
        changed = [path for path in self.references if path in opened and now.get(path) != opened[path]]
        if self.model is None or not changed:
            return self
        name, version = self.state.name, self.state.version
        got = "a change" if changed[0] in now else "no such file"
        field = f"{name}/{version}/references {changed[0]}"
        error = ArtifactError(field, got, "the file as it was opened")
        if isinstance(self.model, TokenModel) and self.model.ngrams is not None:
            self.model.ngrams.close()  # a stream keeps its model
        return self._replace(
            state=VersionState(name, version, "UNAVAILABLE", str(error)), model=None, seen=None, error=error
        )


def log_changes(before: Mapping[tuple[str, int], VersionEntry], after: Mapping[tuple[str, int], VersionEntry]) -> None:
    """Log a line for each version that was loaded, replaced, unloaded or removed, or cannot be opened."""
    for name, version in sorted({*before, *after}):
        old, new = (entries.get((name, version)) for entries in (before, after))
        was, now = (None if entry is None else entry.model for entry in (old, new))
        model = f"model {name} version {version}"
        if new is not None and new.error is not None and (old is None or str(new.error) != str(old.error)):
            state = "cannot be opened; the old one serves" if now else "cannot be opened; it is unavailable"
            LOG.warning("%s %s: %s", model, "is out of service" if new.lost else state, new.error)
        elif now is not was:
            if now is None:
                LOG.info("%s %s", model, "removed" if new is None else "unloaded")
            else:
                LOG.info("%s %s", model, "loaded" if was is None else "replaced")


def name_failure(place: str, error: Exception) -> ArtifactError | Unavailable:
    """Return the error of the version in `place` for an exception of its opening; Unavailable if it may open later."""
    scarce = isinstance(error, MemoryError | Unavailable) or getattr(error, "errno", None) in SCARCE
    if scarce or any(LACK.search(str(cause)) for cause in (error, error.__cause__)):
        reason = "too little memory, or too many open files"
        message = f"{place} cannot be opened now: {reason}"
        return Unavailable(place, reason, "free descriptors and memory", message=message)
    if isinstance(error, OSError):
        error = unreadable(str(error.filename or "a file"), error)
    if not isinstance(error, ArtifactError):
        LOG.error("%s cannot be opened: internal error", place, exc_info=error)
        message = f"{MANIFEST}: the artifact cannot be opened; see the log"
        error = ArtifactError(MANIFEST, "an internal error", "an artifact to run", message=message)
    return ArtifactError(f"{place}/{error.field}", error.got, error.expected, message=f"{place}/{error}")


def fingerprint(folder: Path, references: Iterable[str] = ()) -> Fingerprint:
    """Return the signatures of an artifact's files, and of `references`; they change when a file does.

    Raises:
        OSError: the process lacks descriptors or memory.

    """
    try:
        # Of the target of a link: a changed file in a hub's cache must be seen.
        files = sorted((file.name, signature_of(file.stat(follow_symlinks=file.exists()))) for file in folder.iterdir())
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return ()
    return (*files, *sorted(read_signatures(references).items()))


def read_references(folder: Path) -> tuple[str, ...]:
    """Return the paths of the files referenced by the artifact in `folder`; none for a damaged artifact."""
    try:
        manifest = read_manifest(folder)
    except (ArtifactError, Unavailable):  # the opening names the reason
        return ()
    return tuple(manifest.references) if isinstance(manifest, Manifest) else ()


def changed_in_place(before: Fingerprint, now: Fingerprint) -> bool:
    """Return whether a mapped file is the same as before, but with another size or time of change.

    Any change of a file outside the artifact counts, because the manifest states its size and time.
    """
    then, found = dict(before), dict(now)
    if any(Path(name).is_absolute() and found.get(name) != then[name] for name in then):
        return True
    # Another file may have received the inode of a file without a mapping.
    data, other = then.get(DATA), found.get(DATA)
    return data is not None and other is not None and data[:2] == other[:2] and data[2:4] != other[2:4]
