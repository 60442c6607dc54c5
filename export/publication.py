"""Publishes artifacts: a draft is written, then renamed. A reader sees a complete artifact or none.

A draft is a folder `.preblock-…` beside its result, locked by its process. An unlocked draft was left by a dead
process; the next draft in the same folder removes it. Folders with other names belong to the user, and stay.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from preblock.export.errors import ExportError
from preblock.service.artifacts.catalog import VERSION
from preblock.service.artifacts.names import NAME

DRAFT = ".preblock-"
"""Start of the name of a draft; 16 hexadecimal digits follow."""
MAX_DRAFT_ATTEMPTS = 100
"""Most attempts to make a draft. One fails if another exporter removes the draft before it is locked."""


def check_name(name: str) -> None:
    """Raise ExportError unless `name` is a valid model name, usable in paths and URLs."""
    if not re.fullmatch(NAME, name):
        raise ExportError(
            f"--name: got {name!r}, expected 1 to 128 letters, digits, '.', '_' and '-', the first a letter or digit"
        )


def versions(folder: Path) -> list[int]:
    """Return the versions of the model in `folder`, ascending. As for the service, other files are none."""
    return [version for version in _taken_numbers(folder) if (folder / str(version)).is_dir()]


def _taken_numbers(folder: Path) -> list[int]:
    """Return the numbers that a new version cannot have, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if VERSION.fullmatch(entry.name))


@contextmanager
def draft(repository: Path, name: str) -> Iterator[Path]:
    """Yield a new, locked folder for an artifact; it is removed at the end unless `publish` renamed it."""
    check_name(name)
    with draft_in(repository / name) as folder:
        yield folder


@contextmanager
def draft_in(parent: Path) -> Iterator[Path]:
    """Yield a new, locked folder in `parent`, which is made if missing; the new folder is removed at the end.

    A `parent` that was missing is removed too if it is empty then, and so are the folders above it.
    """
    folder, missing = _new_draft(parent), [place for place in (parent, *parent.parents) if not os.path.lexists(place)]
    with ExitStack() as locks:
        try:
            _create(folder, locks)
            yield folder
        finally:  # also after an interrupt inside `_create`
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # holds a result, or another draft
                for place in missing:
                    place.rmdir()


def publish(folder: Path) -> int:
    """Rename a finished draft to the next version of its model, and return the version."""
    for file in folder.iterdir():
        # A server may run as another user.
        file.chmod(0o644)
        _sync(file)
    folder.chmod(0o755)
    _sync(folder)
    parent = folder.parent
    while True:
        version = max(_taken_numbers(parent), default=0) + 1
        if not VERSION.fullmatch(str(version)):
            raise ExportError(f"version: got {version}, expected at most {version - 1}: remove the highest of {parent}")
        try:
            folder.rename(parent / str(version))
        except OSError:
            if not (parent / str(version)).exists():
                raise
            continue  # another export has published that version
        _sync(parent)
        return version


@contextmanager
def replace_file(file: Path) -> Iterator[Path]:
    """Yield a file to write; it replaces `file` at the end. Concurrent replacements wait for the lock."""
    with locked(file.parent, wait=True), draft_in(file.parent) as folder:
        new = folder / file.name
        yield new
        new.chmod(0o644)
        _sync(new)
        new.replace(file)


@contextmanager
def hidden(folder: Path) -> Iterator[None]:
    """Rename a published artifact to a locked draft, removed at the end. An error before restores the artifact."""
    draft = _new_draft(folder.parent)
    with locked(folder, wait=True):
        try:
            folder.rename(draft)
            yield
        except BaseException:
            if draft.exists():
                draft.rename(folder)
            raise
        shutil.rmtree(draft)


def sweep(parent: Path) -> None:
    """Remove the drafts of dead processes in `parent`."""
    for folder in parent.glob(f"{DRAFT}*"):
        if re.fullmatch(rf"{re.escape(DRAFT)}[0-9a-f]{{16}}", folder.name):
            with suppress(OSError), locked(folder):  # else locked, or removed by another process
                shutil.rmtree(folder)


def make_folder(folder: Path) -> None:
    """Make `folder`, and those above it, unless it exists; raise NotADirectoryError for a file in its place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if not os.path.lexists(folder) or folder.is_dir():
            raise  # another process removed it meanwhile
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error


def _new_draft(parent: Path) -> Path:
    return parent / f"{DRAFT}{secrets.token_hex(8)}"


def _create(folder: Path, locks: ExitStack) -> None:
    """Make the draft `folder`, and add its lock to `locks`."""
    attempts = 0
    while True:
        try:
            make_folder(folder.parent)
            sweep(folder.parent)
            folder.mkdir()
            locks.enter_context(locked(folder, wait=True))
            return
        except OSError as error:
            attempts += 1
            # A failed export may remove the folder of the model, and `sweep` a draft not locked yet.
            if attempts == MAX_DRAFT_ATTEMPTS or not isinstance(error, FileNotFoundError | FileExistsError):
                raise OSError(error.errno, error.strerror, str(folder.parent)) from error


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock `folder`. If another process holds the lock, wait or raise BlockingIOError.

    Raises:
        FileNotFoundError: another process removed or replaced the folder before the lock was taken.

    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
