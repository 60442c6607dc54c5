"""The image and `make serve` set the same variables of glibc, and glibc obeys them. Oracle: its page faults."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

NAMES = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
SCRIPT = """
import resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(25):
    blocks = [b"1" * (3 * 2**20) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 3 * 2**20 // 4096


def image_variables() -> dict[str, str]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    return dict(re.findall(rf"({'|'.join(NAMES)})=(\S+)", text))


def count_page_faults(variables: dict[str, str]) -> int:
    """Return the page faults of a hundred blocks of 3 MiB, with at most four of them allocated at a time."""
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = (sys.executable, "-c", SCRIPT)
    return int(subprocess.run(command, env=others | variables, capture_output=True, check=True).stdout)


def test_make_serve_sets_glibc_variables_of_image() -> None:
    assert set(image_variables()) == set(NAMES)
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = ("make", "--dry-run", "--print-data-base", "serve")
    recipe = subprocess.run(command, cwd=ROOT, env=others, capture_output=True, text=True, check=False).stdout
    for name, value in image_variables().items():
        assert f"\nserve: {name} = {value}\n" in recipe


@pytest.mark.skipif("glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="another C library")
def test_glibc_variables_keep_freed_memory() -> None:
    assert count_page_faults({}) > 50 * PAGES
    assert count_page_faults(image_variables()) < 10 * PAGES
