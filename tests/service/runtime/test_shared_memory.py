"""Registered regions: what no client can reach from outside."""

import os
import resource
import secrets
from pathlib import Path

import pytest

from preblock.service.core.errors import Unavailable
from preblock.service.runtime.shared_memory import OpenRange, Region, RegionRange, SharedFile


@pytest.fixture
def region() -> Region:
    """A region of 8192 bytes, whose file no process can name any more."""
    path = Path("/dev/shm", f"preblock-test-{secrets.token_hex(8)}")
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    path.unlink()
    os.ftruncate(file, 8192)
    return Region("vectors", SharedFile("key", file, 8192), 0, 8192)


def test_write_without_memory_is_unavailable(region: Region) -> None:
    target = OpenRange(RegionRange("outputs[0].parameters", "vectors", 0, 8192), region)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # stands for a full /dev/shm
    try:
        target.write(0, memoryview(bytes(4096)))
        with pytest.raises(Unavailable) as raised:
            target.write(4000, memoryview(bytes(4096)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(raised.value) == "outputs[0].parameters: the region vectors cannot be written: File too large"


def test_no_file_stays_open_without_a_region(region: Region) -> None:
    assert isinstance(region.memory, SharedFile)
    path = Path(f"/proc/self/fd/{region.memory.file}")
    end = SharedFile("key", os.dup(region.memory.file), 8192)
    copy = Path(f"/proc/self/fd/{end.file}")
    assert copy.exists()
    del end
    assert path.exists()
    assert not copy.exists()
