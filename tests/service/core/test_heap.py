"""Whether memory that is free is kept: how many pages the system gives a process again, which it counts itself."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
from preblock.service.core.heap import keep_pages
if {kept}:
    keep_pages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(25):
    waiting = [b"1" * (3 * 2**20) for _ in range(4)]
    del waiting
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 3 * 2**20 // 4096


def faults(kept: bool, **variables: str) -> int:
    """Return how many pages were given for a hundred pieces of 3 MiB, of which four are held at a time."""
    command = (sys.executable, "-c", SCRIPT.format(kept=kept))
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    return int(subprocess.run(command, env=others | variables, capture_output=True, check=True).stdout)


@pytest.mark.skipif("glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="another C library")
class TestGlibc:
    def test_what_is_free_is_used_again(self) -> None:
        assert faults(kept=False) > 50 * PAGES
        assert faults(kept=True) < 10 * PAGES

    @pytest.mark.parametrize(
        "variables",
        [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}],
    )
    def test_what_the_environment_says_holds(self, variables: dict[str, str]) -> None:
        assert faults(kept=True, **variables) > 50 * PAGES
