"""Usable processors: the affinity of the process, and the quota of its control groups.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/cpu of the Linux kernel.
"""

import math
import os
import weakref
from pathlib import Path

from preblock.service.core.system import quota, return_free_memory, usable_cores

V1 = "cpu/a/cpu.cfs"


QUOTAS: list[tuple[str, dict[str, str], float]] = [
    ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
    ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
    ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
    ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "400000 100000\n"}, 1),
    ("0::/docker/1234\n", {"cpu.max": "300000 100000\n"}, 3),  # a container: its own group is the root
    ("4:cpu,cpuacct:/a\n1:memory:/b\n", {f"{V1}_quota_us": "250000", f"{V1}_period_us": "100000"}, 2.5),
    ("4:cpu,cpuacct:/a\n", {f"{V1}_quota_us": "-1", f"{V1}_period_us": "100000"}, math.inf),
    ("0::/\n", {"cpu.max": "a mistake"}, math.inf),
    ("", {}, math.inf),
]


def test_smallest_cpu_quota_applies(tmp_path: Path) -> None:
    assert quota(tmp_path / "none", tmp_path / "none") == math.inf
    for number, (own, files, expected) in enumerate(QUOTAS):
        root, file = tmp_path / str(number), tmp_path / "own"
        file.write_text(own)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        assert quota(root, file) == expected, (own, files)


def test_usable_cores_follow_affinity() -> None:
    before = os.sched_getaffinity(0)
    assert usable_cores() == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_return_free_memory_collects_reference_cycles() -> None:
    class Connection:
        def __init__(self) -> None:
            self.own = self

    freed = weakref.ref(Connection())
    return_free_memory()
    assert freed() is None
