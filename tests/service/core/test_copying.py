"""Whether glibc copies rows slowly, and the process that begins again where it does.

Oracles: descriptions of processors as Linux gives them, and what the process itself says.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from preblock.service.core.copying import NEVER, THRESHOLD, TUNABLES, copies_slowly
from tests.conftest import Server

ZEN_3 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse2 avx2 erms fsrm\n\nprocessor\t: 1\n"
SCRIPT = """
import json, os, sys
from preblock.service.core.copying import begin_again
print(os.getpid(), file=sys.stderr)
begin_again()
print(json.dumps([os.getpid(), sys.argv, os.environ.get("GLIBC_TUNABLES")]))
"""


@pytest.mark.parametrize(
    ("library", "described", "slowly"),
    [
        ("glibc 2.36", ZEN_3, True),
        ("glibc 2.39.9000", ZEN_3, True),
        ("glibc 2.40", ZEN_3, False),
        ("glibc 3.0", ZEN_3, False),
        ("musl 1.2", ZEN_3, False),
        ("glibc of mine", ZEN_3, False),
        ("glibc 2.36", ZEN_3.replace("AuthenticAMD", "GenuineIntel"), False),
        ("glibc 2.36", ZEN_3.replace(" erms", ""), False),
        ("glibc 2.36", ZEN_3.replace(" erms", "").replace("processor\t: 1", "processor\t: 1\nflags\t: erms"), False),
        ("glibc 2.36", "", False),
    ],
)
def test_old_libraries_copy_slowly_on_these_processors(
    tmp_path: Path, library: str, described: str, slowly: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(described)
    assert copies_slowly(library, tmp_path / "cpuinfo") is slowly


def test_where_no_processor_is_described_nothing_is_slow(tmp_path: Path) -> None:
    assert not copies_slowly("glibc 2.36", tmp_path / "cpuinfo")


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (None, f"{THRESHOLD}={NEVER}"),
        ("glibc.malloc.arena_max=1", f"glibc.malloc.arena_max=1:{THRESHOLD}={NEVER}"),
        (f"{THRESHOLD}=4096", f"{THRESHOLD}=4096"),
    ],
)
def test_a_process_begins_again_once_and_is_the_same(told: str | None, kept: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != TUNABLES}
    if told is not None:
        environment[TUNABLES] = told
    command = [sys.executable, "-c", SCRIPT, "one", "--two", "three four"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    again = copies_slowly() and kept != told
    process, arguments, tunables = json.loads(done.stdout)
    assert [int(line) for line in done.stderr.split()] == [process] * (1 + again)
    assert arguments == ["-c", "one", "--two", "three four"]
    assert tunables == (kept if again else told)


def test_a_service_copies_fast(tiny_server: Server) -> None:
    environment = Path(f"/proc/{tiny_server.process.pid}/environ").read_text()
    assert (THRESHOLD in environment) == (copies_slowly() or THRESHOLD in os.environ.get(TUNABLES, ""))
