"""Regions of POSIX shared memory, and copies of bytes from and to them.

A client can shrink its file at any time, and a process that touches the lost pages of a mapping dies (SIGBUS). So bytes
are copied with `pread` and `pwrite`. Only code that handles SIGBUS may write to the mapping of a range.
"""

import mmap
import os
import time
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid, PreblockError, Unavailable

FOLDER = Path("/dev/shm")
FLOAT32_BYTES = 4
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


@dataclass(eq=False)
class Region:
    """A registered region. Its file stays open as long as the object exists.

    Args:
        name: of the region.
        key: name of the shared memory, as the client sent it.
        offset: first byte of the region in the file.
        size: number of bytes.
        file: descriptor of the open file.
        inode: number of the file, the same for all regions of one shared memory.

    """

    name: str
    key: str
    offset: int
    size: int
    file: int
    inode: int
    used: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.file)

    @cached_property
    def mapping(self) -> mmap.mmap:
        """The file up to the end of the region, in the address space of this process."""
        return mmap.mmap(self.file, self.offset + self.size)


@dataclass(frozen=True)
class OpenRange:
    """A checked range of a region. It stays usable if the region is unregistered meanwhile."""

    wanted: RegionRange
    region: Region

    @property
    def begin(self) -> int:
        """First byte in the file."""
        return self.region.offset + self.wanted.offset

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.wanted.size

    def overlaps(self, other: "OpenRange") -> bool:
        """Return whether both ranges have a byte in common."""
        same = self.region.inode == other.region.inode
        return same and self.begin < other.begin + other.size and other.begin < self.begin + self.size

    def read(self) -> bytes:
        """Return a copy of the bytes.

        Raises:
            Invalid: the file has become shorter.

        """
        content = os.pread(self.region.file, self.size, self.begin)
        if len(content) < self.size:
            self.check()
            raise self._shrunk(self.begin + len(content))
        return content

    def write(self, position: int, content: memoryview) -> None:
        """Write bytes at a position in the range.

        Raises:
            Invalid: the file has become shorter.
            Unavailable: the system has no memory for the file.

        """
        self.check()  # else `pwrite` would extend the file again
        begin = self.begin + position
        try:
            while content:
                written = os.pwrite(self.region.file, content, begin)
                content, begin = content[written:], begin + written
        except OSError as error:
            raise self._unwritable(str(error.strerror)) from error

    def map_floats(self, count: int) -> NDArray[np.float32] | None:
        """Return the first values of the range as float32 (count,); None if the system cannot map them there.

        Raises:
            Invalid: the file has become shorter.

        """
        if self.begin % FLOAT32_BYTES:
            return None
        self.check()
        try:
            mapping = self.region.mapping
        except (ValueError, OSError):  # the file ends between the range and the region, or the address space is full
            return None
        return np.frombuffer(mapping, np.float32, count, self.begin)

    def lost(self) -> PreblockError:
        """Return the error for a mapping that cannot be written."""
        try:
            self.check()
        except Invalid as error:
            return error
        return self._unwritable("no memory is left")

    def _unwritable(self, reason: str) -> Unavailable:
        message = f"{self.wanted.field}: the region {self.region.name} cannot be written: {reason}"
        return Unavailable(self.wanted.field, reason, "memory for the region", message=message)

    def check(self) -> None:
        """Raise Invalid if the file has become shorter than the end of the range."""
        size = os.fstat(self.region.file).st_size
        if size < self.begin + self.size:
            raise self._shrunk(size)

    def _shrunk(self, size: int) -> Invalid:
        expected = f"at least {self.begin + self.size} bytes, as at its registration"
        return Invalid(f"{self.wanted.field}: file of the region {self.region.name}", f"{size} bytes", expected)


def open_file(key: str) -> int:
    """Open the shared memory `key` for reading and writing; raise Invalid if that is impossible."""
    name = key.lstrip("/")  # as `shm_open` of glibc
    encoded = len(name.encode(errors="replace"))
    # These checks keep the file in the folder, as those of `shm_open`.
    if not 0 < encoded <= MAX_KEY_BYTES or "/" in name or "\0" in name or name in (".", ".."):
        raise Invalid("key", key, "the name of POSIX shared memory, without a slash after its start")
    if name.startswith(SEMAPHORE_PREFIX):
        raise Invalid("key", key, "the name of shared memory, not of a semaphore")
    try:
        # Without O_NONBLOCK, opening a pipe would wait.
        return os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, UnicodeEncodeError) as error:
        # The reason would show clients which files exist.
        raise Invalid("key", key, "shared memory that this server may read and write") from error
