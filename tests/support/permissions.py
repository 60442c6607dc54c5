"""What the system denies: to another user, and beyond a limit of the process."""

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Become nobody in the block; skip the test where this process is not root."""
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def public_folder() -> Iterator[Path]:
    """Make a folder outside pytest's private folders, for another user."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


@contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Limit a resource of this process in the block. `resource.RLIMIT_FSIZE` stands for a full disk."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
