"""How the C library of this process copies rows of a table.

glibc copies more than 2 kB by `rep movsb` where a processor says that this is fast. AMD's do, from Zen 3 on, and then
take up to three times as long as a loop of vectors would. From 2.40 on glibc does not believe them
(https://sourceware.org/bugzilla/show_bug.cgi?id=30994); an older one is told by a variable, which it reads once, as
the process begins.
"""

import os
import sys
from pathlib import Path

TUNABLES, THRESHOLD = "GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold"
NEVER = 2**40
"""Bytes from which `rep movsb` is used."""
BELIEVES_NOT = (2, 40)
"""The first version of glibc that does not believe these processors."""
PROCESSORS = Path("/proc/cpuinfo")
FIRST = 4096
"""Bytes that describe the first processor."""


def begin_again() -> None:
    """Begin this process again, with the same arguments, where its rows would be copied slowly; else return."""
    told = os.environ.get(TUNABLES, "")
    if THRESHOLD not in told and copies_slowly():
        os.environ[TUNABLES] = f"{told}:{THRESHOLD}={NEVER}".lstrip(":")
        os.execv(sys.executable, sys.orig_argv)


def copies_slowly(library: str | None = None, processors: Path = PROCESSORS) -> bool:
    """Return whether rows are copied slowly.

    Args:
        library: name and version of the C library, such as glibc 2.36; default None: that of this process.
        processors: what describes them, as proc_cpuinfo(5) says.

    """
    try:
        name, version = (library or os.confstr("CS_GNU_LIBC_VERSION") or "").split(" ")
        believes = name == "glibc" and tuple(int(part) for part in version.split(".")[:2]) < BELIEVES_NOT
        with processors.open("rb", buffering=0) as file:
            first = file.read(FIRST).decode("ascii", "replace").partition("\n\n")[0]
    except (OSError, ValueError, AttributeError):  # another library, another system
        return False
    return believes and "AuthenticAMD" in first and "erms" in first.split()
