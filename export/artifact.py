"""Puts artifacts into a repository: written beside, then renamed, so that a reader sees all of one or nothing.

A draft is a folder `<repository>/<name>/.tmp-*` whose exporter holds a lock on it. A draft without a lock was left
by an exporter that died, and is swept by the next.
"""

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from incipit.export.errors import ExportError
from incipit.service.manifest import NAME

DRAFT = ".tmp-"


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
    try:
        lock = _create(folder)
        try:
            yield folder
        finally:
            os.close(lock)
    finally:  # also for who is interrupted while it is made
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
            shutil.rmtree(folder)
            os.close(lock)


def _create(folder: Path) -> int:
    """Make the draft `folder`, and return the descriptor that holds its lock."""
    try:
        while True:
            folder.parent.mkdir(parents=True, exist_ok=True)
            sweep(folder.parent)
            with suppress(FileNotFoundError):  # an export that failed took the name away
                folder.mkdir(exist_ok=True)
            with suppress(FileNotFoundError, BlockingIOError):  # swept before it was locked
                lock = _lock(folder)
                if folder.exists():
                    return lock
                os.close(lock)
    except OSError as error:
        raise ExportError(f"{folder.parent}: {error.strerror}") from error


def _lock(folder: Path, wait: bool = False) -> int:
    """Lock `folder` for as long as the descriptor returned is open; where another has, wait, or raise OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
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
