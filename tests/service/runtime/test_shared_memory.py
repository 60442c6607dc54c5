"""Registered regions: what no client can reach from outside."""

import resource
from pathlib import Path

import pytest

from preblock.service.core.errors import Unavailable
from tests.service.engine.test_output_memory import file_of, open_range


def test_write_without_memory_is_unavailable() -> None:
    target, limits = open_range(8192), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # stands for a full /dev/shm
    try:
        target.write(0, memoryview(bytes(4096)))
        with pytest.raises(Unavailable) as raised:
            target.write(4000, memoryview(bytes(4096)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(raised.value) == "outputs[0].parameters: the region vectors cannot be written: File too large"


def test_no_file_stays_open_without_a_region() -> None:
    target = open_range(64)
    file = Path(f"/proc/self/fd/{file_of(target.region)}")
    assert file.exists()
    del target
    assert not file.exists()
