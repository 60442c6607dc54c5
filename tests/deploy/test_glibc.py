"""The image and `make serve` set the same variable of glibc, and glibc obeys it. Oracle: its page faults."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NAME = "GLIBC_TUNABLES"
BLOCK_BYTES = 64 * 2**20
SCRIPT = f"""
import resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = b"1" * {BLOCK_BYTES}
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LIBRARY, _, VERSION = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
HAS_HUGE_PAGES = (
    LIBRARY == "glibc"
    and tuple(map(int, VERSION.split("."))) >= (2, 35)
    and HUGE_PAGES.exists()
    and "[never]" not in HUGE_PAGES.read_text(encoding="ascii")
)


def image_variable() -> str:
    found = re.search(rf"^ENV {NAME}=(\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def count_page_faults(variables: dict[str, str]) -> int:
    """Return the page faults of a process that fills a block."""
    others = {name: value for name, value in os.environ.items() if name != NAME}
    run = subprocess.run((sys.executable, "-c", SCRIPT), env=others | variables, capture_output=True, check=True)
    return int(run.stdout)


def test_make_serve_sets_glibc_variable_of_image() -> None:
    others = {name: value for name, value in os.environ.items() if name != NAME}
    command = ("make", "--dry-run", "--print-data-base", "serve")
    recipe = subprocess.run(command, cwd=ROOT, env=others, capture_output=True, text=True, check=False).stdout
    assert f"\nserve: {NAME} = {image_variable()}\n" in recipe


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="glibc before 2.35, or no huge pages")
def test_glibc_variable_uses_huge_pages() -> None:
    assert count_page_faults({NAME: image_variable()}) < count_page_faults({}) / 2
