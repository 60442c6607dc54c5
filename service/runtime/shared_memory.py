"""Regions of shared memory, and copies of bytes from and to them.

A client can shrink its file at any time, and a process that touches the lost pages of a mapping dies (SIGBUS). So bytes
are copied with `pread` and `pwrite`. Only code that handles SIGBUS may write to the mapping of a range.
"""

import asyncio
import mmap
import os
import stat
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from preblock.service.core.auth import caller
from preblock.service.core.errors import Forbidden, Invalid, NotFound, PreblockError, TooLarge, Unavailable
from preblock.service.core.settings import LiveSettings
from preblock.service.core.types import FLOAT32_BYTES

FOLDER = Path("/dev/shm")
MAX_KEY_BYTES = 255
SEMAPHORE_PREFIX = "sem."
"""Start of the names of POSIX semaphores, which lie in the same folder."""
MAX_REGIONS = 256
"""Maximum number of regions; each has an open file, or an open handle of a GPU."""
MAX_NAME_BYTES = 128
EXPECTED_NAME = "the name of a registered region"
RELEASE_SECONDS = 1.0
"""Time between two searches for idle regions."""


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
            cause = error.with_traceback(None)  # since Python 3.12 its frames hold the error: a cycle, with the region
            raise self._unusable(verb, str(error.strerror)) from cause

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


class SharedMemory:
    """The registered regions of this process. With API keys, each key has its own regions.

    Args:
        settings: whether shared memory is allowed, and its limits.

    """

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._regions: dict[tuple[str, str], Region] = {}
        self._timer: asyncio.TimerHandle | None = None

    def register(self, name: str, offset: int, size: int, open_memory: Callable[[], Memory]) -> None:
        """Register a region of the memory that `open_memory` returns, after all checks.

        Raises:
            Forbidden: the settings do not allow shared memory.
            Invalid: the name is registered, or the memory does not exist or does not hold the region.
            TooLarge: the region is larger than all regions may be, or those of one key.
            Unavailable: other regions use the limit of bytes or of regions, or the key would hold more than remains.

        """
        self.check_new(name, offset, size)
        self._regions[self._owner(), name] = Region(name, open_memory(), offset, size)
        if self._timer is None:
            self._release_idle()

    def check_new(self, name: str, offset: int, size: int) -> None:
        """Check a region before its memory is opened; raises as `register`."""
        most = self._require_allowed()
        encoded = len(name.encode(errors="replace"))
        if not 0 < encoded <= MAX_NAME_BYTES or "/" in name:
            raise Invalid("name", name, f"1 to {MAX_NAME_BYTES} bytes without a slash")
        if (self._owner(), name) in self._regions:
            message = f"the region {name} is registered already; unregister it first"
            raise Invalid("name", name, "a name that is not registered", message=message)
        if size < 1:
            raise Invalid("byte_size", size, "1 or more")
        if offset < 0:
            raise Invalid("offset", offset, "0 or more")
        if size > most:
            raise TooLarge("byte_size", f"{size} bytes", f"at most {most} bytes for all regions together")
        if self._owner() and size > most // 2:
            raise TooLarge("byte_size", f"{size} bytes", f"at most {most // 2} bytes for one key")
        used = sum(region.size for region in self._regions.values())
        if size > most - used:
            raise Unavailable("byte_size", f"{size} bytes beside {used}", f"at most {most} bytes for all regions")
        if len(self._regions) >= MAX_REGIONS:
            raise Unavailable("regions", f"more than {MAX_REGIONS}", f"at most {MAX_REGIONS}")
        self._check_share(size, most - used - size)

    def _check_share(self, size: int, free_bytes: int) -> None:
        """Raise Unavailable if a key would hold more bytes or regions than remain for the other keys."""
        owner = self._owner()
        if not owner:
            return
        own = [region.size for (other, _), region in self._regions.items() if other == owner]
        if sum(own) + size > free_bytes:
            message = f"byte_size: this key would hold {sum(own) + size} bytes, and leave {free_bytes} to other keys"
            raise Unavailable("byte_size", f"{sum(own) + size} bytes", f"at most {free_bytes} bytes", message=message)
        free = MAX_REGIONS - len(self._regions) - 1
        if len(own) + 1 > free:
            message = f"regions: this key would hold {len(own) + 1} regions, and leave {free} to other keys"
            raise Unavailable("regions", f"{len(own) + 1} regions", f"at most {free} regions", message=message)

    def unregister(self, kind: type[Memory], name: str = "") -> None:
        """Unregister a region of the caller, in memory of a kind; without a name all. An unknown name changes nothing.

        Raises:
            Forbidden: the settings do not allow shared memory.

        """
        self._require_allowed()
        for region in self._list(kind):
            if name in ("", region.name):
                del self._regions[self._owner(), region.name]

    def status(self, kind: type[Memory], name: str = "") -> list[Region]:
        """Return a region of the caller, in memory of a kind; without a name all of them.

        Raises:
            Forbidden: the settings do not allow shared memory.
            NotFound: no region has this name.

        """
        self._require_allowed()
        found = [region for region in self._list(kind) if name in ("", region.name)]
        if name and not found:
            raise NotFound("name", name, EXPECTED_NAME)
        return found

    def read(self, wanted: Sequence[RegionRange]) -> list[bytes]:
        """Return copies of the bytes of ranges.

        Raises:
            Forbidden: the settings do not allow shared memory.
            NotFound: a region is not registered.
            Invalid: a range lies outside its region, or its file has become shorter.
            TooLarge: all ranges together are larger than a request body may be.
            Unavailable: the driver of a GPU cannot read a range.

        """
        most, size = self._settings.current.max_body_bytes, sum(item.size for item in wanted)
        if size > most:
            raise TooLarge("inputs", f"{size} bytes in shared memory", f"at most {most} bytes")
        return [self._open_range(item).read() for item in wanted]

    def open_outputs(self, wanted: Mapping[str, RegionRange]) -> dict[str, OpenRange]:
        """Return the ranges for outputs, by the name of the output.

        Raises:
            Forbidden: the settings do not allow shared memory.
            NotFound: a region is not registered.
            Invalid: a range lies outside its region, its file has become shorter, or two ranges overlap.

        """
        ranges = {name: self._open_range(item) for name, item in wanted.items()}
        for item in ranges.values():
            item.check()
        for (first, one), (second, other) in combinations(ranges.items(), 2):
            if one.overlaps(other):
                raise Invalid(other.wanted.field, f"the same bytes for {first} and {second}", "separate bytes")
        return ranges

    def _open_range(self, wanted: RegionRange) -> OpenRange:
        """Return a range of a registered region, and count it as used."""
        self._require_allowed()
        region = self._regions.get((self._owner(), wanted.region))
        if region is None:
            raise NotFound(f"{wanted.field}.shared_memory_region", wanted.region, EXPECTED_NAME)
        end = wanted.offset + wanted.size
        if end > region.size:
            expected = f"at most {region.size}, the bytes of the region {region.name}"
            raise Invalid(f"{wanted.field}: shared_memory_offset + shared_memory_byte_size", end, expected)
        region.last_use = time.monotonic()
        return OpenRange(wanted, region)

    def _list(self, kind: type[Memory]) -> list[Region]:
        """Return the regions of the caller in memory of a kind."""
        owner = self._owner()
        found = [region for (other, _), region in self._regions.items() if other == owner]
        return [region for region in found if isinstance(region.memory, kind)]

    def _owner(self) -> str:
        """Return the caller's key; without API keys, all callers share their regions."""
        return caller().name if self._settings.current.needs_key else ""

    def _require_allowed(self) -> int:
        """Return the maximum bytes of all regions; raise Forbidden if shared memory is off."""
        most = self._settings.current.max_shared_memory_bytes
        if most is None:
            message = "shared memory is off; the setting max_shared_memory_bytes of the server allows it"
            raise Forbidden("shared memory", "off", "max_shared_memory_bytes", message=message)
        return most

    def _release_idle(self) -> None:
        """Release regions after their idle timeout, every second while there are any: the timeout may change."""
        now, timeout = time.monotonic(), self._settings.current.shared_memory_idle_timeout_seconds
        self._timer = None
        for key, region in tuple(self._regions.items()):
            if region.last_use + timeout <= now:
                del self._regions[key]
        if self._regions:
            self._timer = asyncio.get_running_loop().call_later(RELEASE_SECONDS, self._release_idle)
