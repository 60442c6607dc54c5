"""How the C library of this process keeps memory that is free.

glibc gives what is large back to the system as soon as it is free, and is given what it needs next page by page, each
set to zero: an answer in base64 of 4 MB takes 0.4 ms of the processor longer so. Here some of it is kept.
"""

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""What `mallopt` sets, by its numbers (`malloc.h`)."""
KEPT = 2**25
"""Bytes at the end of the heap that stay when they are free: what a large answer as text takes, which is made whole."""
ITS_OWN = 2**25
"""Bytes from which a piece is not of the heap, and goes when it is free; glibc allows no more."""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
TUNABLES = ("GLIBC_TUNABLES", "glibc.malloc.")


def keep_pages() -> None:
    """Keep some memory that is free, unless the environment says how much (mallopt(3)), or there is no `mallopt`."""
    name, prefix = TUNABLES
    if any(variable in os.environ for variable in VARIABLES) or prefix in os.environ.get(name, ""):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another library
        return
    mallopt(MMAP_THRESHOLD, ITS_OWN)
    mallopt(TRIM_THRESHOLD, KEPT)
