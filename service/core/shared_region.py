"""Regions of shared memory, and copies of bytes from and to them.

A client can shrink its file at any time, and a process that touches the lost pages of a mapping dies (SIGBUS). So bytes
are copied with `pread` and `pwrite`. Only code that handles SIGBUS may write to the mapping of a range.
"""

import mmap
import os
import stat
import time
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid, PreblockError, Unavailable
from preblock.service.core.types import FLOAT32_BYTES

FOLDER = Path("/dev/shm")
MAX_KEY_BYTES = 255
SEMAPHORE_PREFIX = "sem."
"""Start of the names of POSIX semaphores, which lie in the same folder."""


class RegionRange(NamedTuple):
    """A range of bytes in a region, as a request names it.

    Args:
        field: parameters with the range, for error messages.
        region: name of the region.
        offset: first byte, counted from the start of the region.
        size: number of bytes.

    """

    field: str
    region: str
    offset: int
    size: int


class Memory(Protocol):
    """Memory of a client that holds regions: a file, or memory of a GPU. Addresses count bytes."""

    @property
    def origin(self) -> int:
        """Address of the first byte."""

    @property
    def identity(self) -> Hashable:
        """Equal for memories whose equal addresses are the same bytes."""

    def end(self) -> int:
        """Return the address after the last byte; a file can become shorter."""

    def read(self, address: int, size: int) -> bytes:
        """Return bytes, fewer than `size` if the memory has become shorter; raise OSError if that is impossible."""

    def write(self, address: int, content: memoryview) -> None:
        """Write bytes; raise OSError if that is impossible."""


class SharedFile:
    """POSIX shared memory. Its file stays open as long as the object exists.

    Args:
        key: name of the shared memory, as the client sent it.
        file: descriptor of the open file.
        mapped_bytes: bytes up to the end of the region.

    """

    origin = 0

    def __init__(self, key: str, file: int, mapped_bytes: int) -> None:
        self.key, self.file, self._mapped_bytes = key, file, mapped_bytes
        self.identity = os.fstat(file).st_ino
        weakref.finalize(self, os.close, file)

    @cached_property
    def mapping(self) -> mmap.mmap:
        """The file up to the end of the region, in the address space of this process."""
        return mmap.mmap(self.file, self._mapped_bytes)

    def end(self) -> int:
        """Return the size of the file."""
        return os.fstat(self.file).st_size

    def read(self, address: int, size: int) -> bytes:
        """Return bytes, fewer than `size` if the file has become shorter."""
        return os.pread(self.file, size, address)

    def write(self, address: int, content: memoryview) -> None:
        """Write bytes; raise OSError if the system has no memory for them."""
        while content:
            written = os.pwrite(self.file, content, address)
            content, address = content[written:], address + written


@dataclass(eq=False)
class Region:
    """A registered region. Its memory stays open as long as the object exists.

    Args:
        name: of the region.
        memory: holds the region.
        offset: first byte of the region in the memory.
        size: number of bytes.
        last_use: time of the last request with the region, in seconds of `time.monotonic`.

    """

    name: str
    memory: Memory
    offset: int
    size: int
    last_use: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class OpenRange:
    """A checked range of a region. It stays usable if the region is unregistered meanwhile."""

    wanted: RegionRange
    region: Region

    @property
    def begin(self) -> int:
        """Address of the first byte."""
        return self.region.memory.origin + self.region.offset + self.wanted.offset

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.wanted.size

    def overlaps(self, other: "OpenRange") -> bool:
        """Return whether both ranges have a byte in common."""
        same = self.region.memory.identity == other.region.memory.identity
        return same and self.begin < other.begin + other.size and other.begin < self.begin + self.size

    def read(self) -> bytes:
        """Return a copy of the bytes.

        Raises:
            Invalid: the file has become shorter.
            Unavailable: the driver of the GPU cannot read the memory.

        """
        with self.name_errors("read"):
            content = self.region.memory.read(self.begin, self.size)
        if len(content) < self.size:
            self.check()
            raise self._shrunk(self.begin + len(content))
        return content

    def write(self, position: int, content: memoryview) -> None:
        """Write bytes at a position in the range.

        Raises:
            Invalid: the file has become shorter.
            Unavailable: the system has no memory for the file, or the driver of the GPU cannot write the memory.

        """
        self.check()  # else `pwrite` would extend the file again
        with self.name_errors("written"):
            self.region.memory.write(self.begin + position, content)

    def map_floats(self, count: int) -> NDArray[np.float32] | None:
        """Return the first values of the range as float32 (count,); None if the system cannot map them there.

        Raises:
            Invalid: the file has become shorter.

        """
        memory = self.region.memory
        if not isinstance(memory, SharedFile) or self.begin % FLOAT32_BYTES:
            return None
        self.check()
        try:
            mapping = memory.mapping
        except (ValueError, OSError):  # the file ends between the range and the region, or the address space is full
            return None
        return np.frombuffer(mapping, np.float32, count, self.begin)

    def lost(self) -> PreblockError:
        """Return the error for a mapping that cannot be written."""
        try:
            self.check()
        except Invalid as error:
            return error
        return self._unusable("written", "no memory is left")

    @contextmanager
    def name_errors(self, verb: str) -> Iterator[None]:
        """Raise Unavailable in place of OSError: the region cannot be `verb`, "read" or "written"."""
        try:
            yield
        except OSError as error:
            raise self._unusable(verb, str(error.strerror)) from error

    def _unusable(self, verb: str, reason: str) -> Unavailable:
        message = f"{self.wanted.field}: the region {self.region.name} cannot be {verb}: {reason}"
        return Unavailable(self.wanted.field, reason, "memory for the region", message=message)

    def check(self) -> None:
        """Raise Invalid if the file has become shorter than the end of the range."""
        end = self.region.memory.end()
        if end < self.begin + self.size:
            raise self._shrunk(end)

    def _shrunk(self, size: int) -> Invalid:
        expected = f"at least {self.begin + self.size} bytes, as at its registration"
        return Invalid(f"{self.wanted.field}: file of the region {self.region.name}", f"{size} bytes", expected)


def open_file(key: str, offset: int, size: int) -> SharedFile:
    """Open the shared memory `key` for reading and writing a region.

    Raises:
        Invalid: no such shared memory exists, this server may not use it, or it is shorter than the region.

    """
    name = key.lstrip("/")  # as `shm_open` of glibc
    encoded = len(name.encode(errors="replace"))
    # These checks keep the file in the folder, as those of `shm_open`.
    if not 0 < encoded <= MAX_KEY_BYTES or "/" in name or "\0" in name or name in (".", ".."):
        raise Invalid("key", key, "the name of POSIX shared memory, without a slash after its start")
    if name.startswith(SEMAPHORE_PREFIX):
        raise Invalid("key", key, "the name of shared memory, not of a semaphore")
    try:
        # Without O_NONBLOCK, opening a pipe would wait.
        file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, UnicodeEncodeError) as error:
        # The reason would show clients which files exist.
        raise Invalid("key", key, "shared memory that this server may read and write") from error
    memory, found = SharedFile(key, file, offset + size), os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_size < offset + size:
        got = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "another kind of file"
        raise Invalid(f"shared memory {key}", got, f"at least {offset + size} bytes, offset and byte_size together")
    return memory
