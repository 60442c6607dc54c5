"""The machine of this process: its processors, and its free memory."""

import asyncio
import ctypes
import gc
import math
import os
import platform
import re
from pathlib import Path

PROCESSORS = Path("/proc/cpuinfo")
CGROUP_MOUNT, CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LIBC = ctypes.CDLL(None)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt` (malloc.h of glibc)."""
MAX_HEAP_BLOCK_BYTES, MAX_FREE_BYTES = 2**25, 2**26
"""Largest block in the heap, and most free memory at its end. glibc itself raises both up to these values."""
GROWTH_SECONDS, GROWTH_BYTES = 10.0, 2**25
"""Time between two looks at the memory, and its growth that may be free memory of the allocator."""


def usable_cores() -> int:
    """Return the number of processors allowed by the affinity and the control groups of this process."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(affinity, quota())))


def describe_machine() -> str:
    """Return the processor, the number of usable cores, and the operating system in one line."""
    try:
        named = re.search(r"^model name\s*: (.+)$", PROCESSORS.read_text(), re.MULTILINE)
    except OSError:  # not on Linux
        named = None
    processor = named[1].strip() if named else platform.machine()
    return f"{processor}, {usable_cores()} cores, {platform.system()}"


def quota(groups: Path = CGROUP_MOUNT, own: Path = CGROUP_FILE) -> float:
    """Return the CPU quota of this process's control groups, in processors; infinity without a limit.

    Args:
        groups: mount point of control groups, version 2 or the controller `cpu` of version 1 (cgroups(7)).
        own: file with the groups of this process.

    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not on Linux
        return math.inf
    lowest = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = groups
        elif "cpu" in controllers.split(","):
            root = groups / "cpu"
        else:
            continue
        group = root / path.lstrip("/")
        # A parent group may set the limit. In a container, the process's own group is mounted as the root.
        for folder in (group, *group.parents):
            lowest = min(lowest, _limit(folder))
            if folder == root:
                break
    return lowest


def _limit(folder: Path) -> float:
    """Return the CPU quota of one group, in processors."""
    try:
        if (file := folder / "cpu.max").exists():
            allowed, period = file.read_text().split()
        else:
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.inf if allowed == "max" or int(allowed) < 0 else int(allowed) / int(period)
    except (OSError, ValueError):
        return math.inf


def use_single_arena() -> None:
    """Let all threads allocate from one arena, before the first thread starts.

    `malloc_trim` cannot return the last free chunk of any other arena, up to 64 MiB for each thread.
    """
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(M_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Return the free memory of the allocator to the system. Other libraries than glibc do so themselves."""
    gc.collect()  # the objects of a closed WebSocket refer to each other, and hold its last messages
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


async def bound_free_memory() -> None:
    """Keep free memory for reuse, and return it to the system whenever memory has grown, until cancelled.

    Connections take memory that no limit counts, such as the buffers of TLS handshakes. glibc would return the memory
    of a gRPC response of some MB at once, and clearing new pages would cost the next one a tenth of its time.
    """
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BLOCK_BYTES)
        LIBC.mallopt(M_TRIM_THRESHOLD, MAX_FREE_BYTES)
    lowest = anonymous_bytes()
    while True:
        await asyncio.sleep(GROWTH_SECONDS)
        lowest = min(lowest, anonymous_bytes())
        if anonymous_bytes() - lowest >= GROWTH_BYTES:
            await asyncio.to_thread(return_free_memory)
            lowest = anonymous_bytes()  # the rest is in use


def anonymous_bytes() -> int:
    """Return the memory of this process without files, in bytes; 0 where the system does not tell (proc(5))."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
