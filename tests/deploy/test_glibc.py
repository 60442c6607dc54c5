"""The image and `make serve` set the same variables of glibc, and glibc obeys them. Oracle: its page faults."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NAMES = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
SCRIPT = """
import resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({rounds}):
    blocks = [b"1" * {size} for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGE_BYTES = resource.getpagesize()
SMALL, LARGE = 3 * 2**20, 64 * 2**20
"""Bytes of a block that glibc keeps when it is freed, and of one that it never keeps."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LIBRARY, _, VERSION = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
GLIBC = LIBRARY == "glibc"
HAS_HUGE_PAGES = (
    GLIBC
    and tuple(map(int, VERSION.split("."))) >= (2, 35)
    and HUGE_PAGES.exists()
    and "[never]" not in HUGE_PAGES.read_text(encoding="ascii")
)


def image_variables() -> dict[str, str]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    return dict(re.findall(rf"({'|'.join(NAMES)})=(\S+)", text))


def count_page_faults(variables: dict[str, str], size: int, rounds: int) -> float:
    """Return the page faults for each page of `rounds` times four blocks of `size` bytes."""
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = (sys.executable, "-c", SCRIPT.format(size=size, rounds=rounds))
    run = subprocess.run(command, env=others | variables, capture_output=True, check=True)
    return int(run.stdout) / (4 * rounds * size / PAGE_BYTES)


def test_make_serve_sets_glibc_variables_of_image() -> None:
    assert set(image_variables()) == set(NAMES)
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = ("make", "--dry-run", "--print-data-base", "serve")
    recipe = subprocess.run(command, cwd=ROOT, env=others, capture_output=True, text=True, check=False).stdout
    for name, value in image_variables().items():
        assert f"\nserve: {name} = {value}\n" in recipe


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_glibc_variables_keep_freed_memory() -> None:
    assert count_page_faults({}, SMALL, 25) > 0.5
    assert count_page_faults(image_variables(), SMALL, 25) < 0.1


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="glibc before 2.35, or no huge pages")
def test_glibc_variables_use_huge_pages() -> None:
    assert count_page_faults(image_variables(), LARGE, 2) < count_page_faults({}, LARGE, 2) / 2
