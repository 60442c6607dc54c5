"""Registry of the regions of shared memory.

Source: Triton, "System shared memory extension" and "CUDA shared memory extension".
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from preblock.service.core.auth import caller
from preblock.service.core.errors import Forbidden, Invalid, NotFound, TooLarge, Unavailable
from preblock.service.core.settings_reload import LiveSettings
from preblock.service.core.shared_region import Memory, OpenRange, Region, RegionRange

MAX_REGIONS = 256
"""Maximum number of regions; each has an open file, or an open handle of a GPU."""
MAX_NAME_BYTES = 128
EXPECTED_NAME = "the name of a registered region"
RELEASE_SECONDS = 1.0
"""Time between two searches for idle regions."""


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
