"""Number of processors available to this process."""

import math
import os
from pathlib import Path

CGROUP_MOUNT, CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the number of processors allowed by the affinity and the control groups of this process."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(affinity, quota())))


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
