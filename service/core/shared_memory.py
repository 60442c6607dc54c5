"""Registered regions of POSIX shared memory, and copies of bytes from and to them.

Bytes are copied with `pread` and `pwrite`. A mapping would be a little faster, but a client can shrink its file at any
time, and a process that touches the lost pages of a mapping dies (SIGBUS).

Source: Triton, "System shared memory extension".
"""

import asyncio
import os
import stat
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from preblock.service.core.auth import caller
from preblock.service.core.errors import Forbidden, Invalid, NotFound, TooLarge, Unavailable
from preblock.service.core.settings_reload import LiveSettings

FOLDER = Path("/dev/shm")
MAX_REGIONS = 256
"""Maximum number of regions; each has an open file."""
MAX_NAME_BYTES = 128
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
            message = f"{self.wanted.field}: the region {self.region.name} cannot be written: {error.strerror}"
            raise Unavailable(self.wanted.field, error.strerror, "memory for the region", message=message) from error

    def check(self) -> None:
        """Raise Invalid if the file has become shorter than the end of the range."""
        size = os.fstat(self.region.file).st_size
        if size < self.begin + self.size:
            raise self._shrunk(size)

    def _shrunk(self, size: int) -> Invalid:
        expected = f"at least {self.begin + self.size} bytes, as at its registration"
        return Invalid(f"{self.wanted.field}: file of the region {self.region.name}", f"{size} bytes", expected)


class SharedMemory:
    """The registered regions of this process. With API keys, each key has its own regions.

    Args:
        settings: whether shared memory is allowed, and its limits.

    """

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._regions: dict[tuple[str, str], Region] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def allowed(self) -> bool:
        """Whether clients may register regions."""
        return self._settings.current.max_shared_memory_bytes is not None

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Register a region of the shared memory `key`.

        Raises:
            Forbidden: the settings do not allow shared memory.
            Invalid: the name is registered, no such shared memory exists, or it is shorter than the region.
            TooLarge: the region is larger than all regions may be.
            Unavailable: other regions use the limit of bytes or of regions.

        """
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
        used = sum(region.size for region in self._regions.values())
        if size > most - used:
            raise Unavailable("byte_size", f"{size} bytes beside {used}", f"at most {most} bytes for all regions")
        if len(self._regions) >= MAX_REGIONS:
            raise Unavailable("regions", f"more than {MAX_REGIONS}", f"at most {MAX_REGIONS}")
        file = _open(key)
        found = os.fstat(file)
        region = Region(name, key, offset, size, file, found.st_ino)
        if not stat.S_ISREG(found.st_mode) or found.st_size < offset + size:
            got = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "another kind of file"
            raise Invalid(f"shared memory {key}", got, f"at least {offset + size} bytes, offset and byte_size together")
        self._regions[self._owner(), name] = region
        if self._timer is None:
            self._release_idle()

    def unregister(self, name: str = "") -> None:
        """Unregister a region of the caller; without a name all of them. An unknown name changes nothing.

        Raises:
            Forbidden: the settings do not allow shared memory.

        """
        self._require_allowed()
        for region in self._list():
            if name in ("", region.name):
                del self._regions[self._owner(), region.name]

    def status(self, name: str = "") -> list[Region]:
        """Return a region of the caller; without a name all of them.

        Raises:
            Forbidden: the settings do not allow shared memory.
            NotFound: no region has this name.

        """
        self._require_allowed()
        return [self._find("name", name)] if name else self._list()

    def read(self, wanted: Sequence[RegionRange]) -> list[bytes]:
        """Return copies of the bytes of ranges.

        Raises:
            Forbidden: the settings do not allow shared memory.
            NotFound: a region is not registered.
            Invalid: a range lies outside its region, or its file has become shorter.
            TooLarge: all ranges together are larger than a request body may be.

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
        region = self._find(f"{wanted.field}.shared_memory_region", wanted.region)
        end = wanted.offset + wanted.size
        if end > region.size:
            expected = f"at most {region.size}, the bytes of the region {region.name}"
            raise Invalid(f"{wanted.field}: shared_memory_offset + shared_memory_byte_size", end, expected)
        region.used = time.monotonic()
        return OpenRange(wanted, region)

    def _find(self, place: str, name: str) -> Region:
        region = self._regions.get((self._owner(), name))
        if region is None:
            raise NotFound(place, name, "the name of a registered region")
        return region

    def _list(self) -> list[Region]:
        """Return the regions of the caller."""
        owner = self._owner()
        return [region for (other, _), region in self._regions.items() if other == owner]

    def _owner(self) -> str:
        """Return the caller's key; without API keys, all callers share their regions."""
        return "" if self._settings.current.api_keys_file is None else caller().name

    def _require_allowed(self) -> int:
        """Return the maximum bytes of all regions; raise Forbidden if shared memory is off."""
        most = self._settings.current.max_shared_memory_bytes
        if most is None:
            message = "shared memory is off; the setting max_shared_memory_bytes of the server allows it"
            raise Forbidden("shared memory", "off", "max_shared_memory_bytes", message=message)
        return most

    def _release_idle(self) -> None:
        """Release regions after their idle timeout, and set the timer for the next one."""
        now, timeout = time.monotonic(), self._settings.current.shared_memory_idle_timeout_seconds
        self._timer = None
        for key, region in tuple(self._regions.items()):
            if region.used + timeout <= now:
                del self._regions[key]
        if self._regions:
            wait = min(region.used for region in self._regions.values()) + timeout - now
            self._timer = asyncio.get_running_loop().call_later(wait, self._release_idle)


def _open(key: str) -> int:
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
