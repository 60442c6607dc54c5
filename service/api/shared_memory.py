"""Shared memory, the same over HTTP and gRPC: its registration, and outputs written to it before the response."""

import asyncio
import math
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from preblock.service.codecs.chunks import raw_bytes, split_buffer
from preblock.service.codecs.v2.metadata import CUDA_SHARED_MEMORY_EXTENSION, SHARED_MEMORY_EXTENSION
from preblock.service.codecs.v2.parameters import SIZE
from preblock.service.codecs.v2.requests import InferMessage
from preblock.service.codecs.v2.responses import list_outputs
from preblock.service.core.errors import Invalid
from preblock.service.core.types import FLOAT32_BYTES, ChunkedTensor, GpuTarget, Result
from preblock.service.engine.engine import Engine
from preblock.service.runtime.cuda_driver import has_driver
from preblock.service.runtime.cuda_memory import SESSION_GPU, DeviceMemory, open_memory
from preblock.service.runtime.fused_embedding import guard_mapped_files
from preblock.service.runtime.session import INLINE_MAX_VALUES
from preblock.service.runtime.shared_memory import OpenRange, open_file


def register_file(engine: Engine, name: str, key: str, offset: int, size: int) -> None:
    """Register a region of the POSIX shared memory `key`.

    Raises:
        Forbidden: the settings do not allow shared memory.
        Invalid: a value is not allowed, or no such shared memory exists.
        TooLarge: the region is larger than all regions may be.
        Unavailable: other regions use a limit.

    """
    engine.shared_memory.register(name, offset, size, partial(open_file, key, offset, size))


async def register_device(engine: Engine, name: str, handle: bytes, device_id: int, size: int) -> None:
    """Register a region in memory of a GPU. The first one makes a context, which may take a second.

    Raises:
        Forbidden: the settings do not allow shared memory, or the server has no GPU.
        Invalid: a value is not allowed, or the handle cannot be opened.
        TooLarge: the region is larger than all regions may be.
        Unavailable: other regions use a limit, or the driver fails.

    """
    shared = engine.shared_memory
    shared.check_new(name, 0, size)
    memory = await engine.scheduler.run(INLINE_MAX_VALUES + 1, partial(open_memory, handle, device_id, size))
    shared.register(name, 0, size, lambda: memory)


async def list_extensions(engine: Engine) -> tuple[str, ...]:
    """Return the extensions of shared memory that the server allows."""
    if engine.settings.current.max_shared_memory_bytes is None:
        return ()
    # The driver starts at the first call.
    cuda = await asyncio.to_thread(has_driver)
    return (SHARED_MEMORY_EXTENSION, CUDA_SHARED_MEMORY_EXTENSION) if cuda else (SHARED_MEMORY_EXTENSION,)


async def write_shared(answer: Result, infer: InferMessage, ranges: Mapping[str, OpenRange]) -> None:
    """Write each output of `ranges` into its range. Other requests run between the chunks.

    Raises:
        Invalid: a range is too small, or its file has become shorter; then the ranges may hold a part of the outputs.
        Unavailable: the system has no memory for a range, or the driver of a GPU cannot write it.

    """
    tensors = {name: tensor for name, _, tensor in list_outputs(answer, infer) if name in ranges}
    for name, tensor in tensors.items():
        target = ranges[name]
        if tensor.nbytes > target.size:
            expected = f"at least {tensor.nbytes}, the bytes of the output {name}"
            raise Invalid(f"{target.wanted.field}.{SIZE}", target.size, expected)
    for name, tensor in tensors.items():
        if isinstance(tensor, ChunkedTensor) and _lend(ranges[name], tensor):
            for _ in tensor:
                await asyncio.sleep(0)
        else:
            await _copy(ranges[name], tensor if isinstance(tensor, ChunkedTensor) else (tensor,))


def _lend(target: OpenRange, tensor: ChunkedTensor) -> bool:
    """Make the model write a tensor into its range, which saves copies; return whether it can."""
    memory = target.region.memory
    if tensor.memory is None:
        return False
    if tensor.memory.on_gpu:
        if not isinstance(memory, DeviceMemory) or memory.device_id != SESSION_GPU or target.begin % FLOAT32_BYTES:
            return False
        tensor.memory.target = GpuTarget(target.begin, partial(_copy_on_gpu, target, memory))
        return True
    vectors = target.map_floats(math.prod(tensor.shape))
    if vectors is None:
        return False
    guard_mapped_files()
    tensor.memory.vectors = vectors.reshape(-1, tensor.shape[-1])
    tensor.memory.lost = target.lost
    return True


def _copy_on_gpu(target: OpenRange, memory: DeviceMemory, position: int, address: int, size: int) -> None:
    """Copy `size` bytes from an address of the GPU to a position in the range."""
    with target.name_errors("written"):
        memory.copy(target.begin + position, address, size)


async def _copy(target: OpenRange, chunks: Iterable[NDArray[np.generic]]) -> None:
    """Write the chunks of a tensor into its range."""
    position = 0
    for chunk in chunks:
        for content in split_buffer(raw_bytes(chunk)):
            target.write(position, content)
            position += len(content)
            del content
            await asyncio.sleep(0)
        del chunk  # lets the next chunk reuse this buffer
