"""Vectors computed in memory of a client, a mapped file. Oracle: the same vectors in memory of the server."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from preblock.service.core.errors import Invalid, Unavailable
from preblock.service.core.types import ChunkedTensor, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.runtime.fused_embedding import BUILT, guard_mapped_files
from preblock.service.runtime.shared_memory import OpenRange, Region, RegionRange, SharedFile
from tests.support.artifacts import copy_artifact
from tests.support.engines import answer_of, open_engine

pytestmark = pytest.mark.skipif(not BUILT, reason="_fused_embedding.c was not built")
WIDTH = 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("direct")
    copy_artifact("gpt-300x64x5000", root, "gpt")
    copy_artifact("bert-300x64x5000", root, "bert")
    with open_engine(root) as engine:
        yield engine


def open_range(size: int, offset: int = 0) -> OpenRange:
    """Return a range of a new region, whose file no process can name any more."""
    path = Path("/dev/shm", f"preblock-test-{secrets.token_hex(8)}")
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    path.unlink()
    os.ftruncate(file, offset + size)
    region = Region("vectors", SharedFile("key", file, offset + size), 0, offset + size)
    return OpenRange(RegionRange("outputs[0].parameters", "vectors", offset, size), region)


def file_of(region: Region) -> int:
    assert isinstance(region.memory, SharedFile)
    return region.memory.file


def tensor_of(engine: Engine, lengths: list[int], model: str = "gpt", dtype: str = "float32") -> ChunkedTensor:
    ids = np.random.default_rng(0).integers(8, 300, sum(lengths))
    request = TokenRequest(input_ids=TokenRows(ids, np.array(lengths)), chunks="sent", dtype=dtype)
    tensor = answer_of(engine, model, request).tensors["embeddings"]
    assert isinstance(tensor, ChunkedTensor)
    return tensor


@pytest.mark.parametrize("lengths", [[100] * 90, [4100] * 3, [3, 4000, 1, 4999, 17]], ids=["short", "long", "ragged"])
def test_vectors_have_the_same_bits(engine: Engine, lengths: list[int]) -> None:
    expected = np.concatenate([chunk.reshape(-1) for chunk in tensor_of(engine, lengths)])
    tensor, target = tensor_of(engine, lengths), open_range(4 * sum(lengths) * WIDTH, 8)
    vectors = target.map_floats(expected.size)
    assert vectors is not None
    assert tensor.memory is not None
    tensor.memory.vectors, tensor.memory.lost = vectors.reshape(-1, WIDTH), target.lost
    assert sum(chunk.nbytes for chunk in tensor) == tensor.nbytes
    assert target.read() == expected.tobytes()


def test_other_models_and_types_keep_their_memory(engine: Engine) -> None:
    for tensor in (tensor_of(engine, [4100] * 3, "bert"), tensor_of(engine, [4100] * 3, dtype="float16")):
        assert tensor.memory is None


def test_memory_that_is_not_mapped_is_copied_to() -> None:
    """A file that ends between range and region; and a range that is not aligned."""
    region = open_range(128).region
    target = OpenRange(RegionRange("outputs[0].parameters", "vectors", 0, 64), region)
    os.ftruncate(file_of(region), 64)
    assert target.map_floats(16) is None
    target.write(0, memoryview(b"x" * 64))
    assert target.read() == b"x" * 64
    assert open_range(64, 2).map_floats(16) is None
    error = open_range(64).lost()  # a full file system raises SIGBUS, too
    assert isinstance(error, Unavailable)
    assert str(error) == "outputs[0].parameters: the region vectors cannot be written: no memory is left"


def test_memory_that_becomes_shorter_is_an_error_of_the_request(engine: Engine) -> None:
    guard_mapped_files()
    size = 4 * 12300 * WIDTH
    tensor, target = tensor_of(engine, [4100] * 3), open_range(size)
    vectors = target.map_floats(12300 * WIDTH)
    assert vectors is not None
    assert tensor.memory is not None
    tensor.memory.vectors, tensor.memory.lost = vectors.reshape(-1, WIDTH), target.lost
    next(iter(tensor))
    os.ftruncate(file_of(target.region), size // 2)
    with pytest.raises(Invalid, match=f"file of the region vectors: got {size // 2} bytes, expected at least {size} "):
        list(tensor)
    assert sum(chunk.size for chunk in tensor_of(engine, [4100] * 3)) == 12300 * WIDTH


def test_bus_error_outside_the_output_stays_fatal() -> None:
    code = """
import mmap, os
from preblock.service.runtime.fused_embedding import guard_mapped_files
guard_mapped_files()
file = os.memfd_create("x")
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
os.ftruncate(file, 0)
memory[0]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGBUS
