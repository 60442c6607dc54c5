"""Puts artifacts into a repository: written beside, then renamed, so that a reader sees all of one or nothing.

A draft is a folder `<repository>/<name>/.tmp-*` whose exporter holds a lock on it. A draft without a lock was left
by an exporter that died, and is swept by the next.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from preblock.export.errors import ExportError
from preblock.service.artifacts.manifest import NAME

DRAFT = ".tmp-"
ATTEMPTS = 100
"""How often a draft is made that others take away before it is locked; each time takes one who comes just then."""


def check_name(name: str) -> None:
    """Raise ExportError unless `name` can be a model's: it is part of paths and URLs."""
    if not re.fullmatch(NAME, name):
        raise ExportError(
            f"--name: got {name!r}, allowed 1 to 128 letters, digits, '.', '_' and '-', the first a letter or digit"
        )


def versions(folder: Path) -> list[int]:
    """Return the versions of the model in `folder`, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if re.fullmatch(r"[1-9][0-9]*", entry.name))


@contextmanager
def draft(repository: Path, name: str) -> Iterator[Path]:
    """Give a new folder to write an artifact in, locked; it is gone at the end unless `publish` renamed it."""
    check_name(name)
    folder = repository / name / f"{DRAFT}{secrets.token_hex(8)}"
    lock = None
    try:
        lock = _create(folder)
        yield folder
    finally:  # also for who is interrupted while it is made
        if lock is not None:
            os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the name itself, where this would have been its first version
            folder.parent.rmdir()


def publish(folder: Path) -> int:
    """Rename a finished draft to the next version of its model, and return the version."""
    for file in folder.iterdir():
        # mkstemp-like modes would keep a server of another user out.
        file.chmod(0o644)
        _sync(file)
    folder.chmod(0o755)
    _sync(folder)
    parent = folder.parent
    while True:
        version = max(versions(parent), default=0) + 1
        try:
            folder.rename(parent / str(version))
        except OSError:
            if not (parent / str(version)).exists():
                raise
            continue  # another export took that version in the meantime
        _sync(parent)
        return version


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Give a file to write, which takes the place of `file` at the end; others who would replace it wait."""
    lock = _lock(file.parent, wait=True)
    try:
        with tempfile.TemporaryDirectory(prefix=DRAFT, dir=file.parent) as folder:
            new = Path(folder) / file.name
            yield new
            new.chmod(0o644)
            _sync(new)
            new.replace(file)
    finally:
        os.close(lock)


def sweep(parent: Path) -> None:
    """Remove the drafts in `parent` whose exporters are gone."""
    for folder in parent.glob(f"{DRAFT}*"):
        with suppress(OSError):  # locked, or swept by another
            lock = _lock(folder)
            try:
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _create(folder: Path) -> int:
    """Make the draft `folder`, and return the descriptor that holds its lock."""
    attempts = 0
    while True:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            sweep(folder.parent)
            folder.mkdir()
            return _lock(folder, wait=True)
        except OSError as error:
            attempts += 1
            # An export that failed may have taken the name away, and a sweeper what was not locked yet.
            if attempts == ATTEMPTS or not isinstance(error, FileNotFoundError | FileExistsError):
                raise ExportError(f"{folder.parent}: {error.strerror}") from error


def _lock(folder: Path, wait: bool = False) -> int:
    """Lock `folder` for as long as the descriptor returned is open; where another has, wait, or raise OSError.

    What another took away, or made anew, while it was being locked raises FileNotFoundError.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
