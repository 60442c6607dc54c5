"""Outputs in shared memory, written chunk by chunk before the response that names them."""

import asyncio
import math
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from preblock.service.codecs.chunks import raw_bytes, split_buffer
from preblock.service.codecs.v2.infer import InferMessage
from preblock.service.codecs.v2.infer_response import list_outputs
from preblock.service.codecs.v2.shared_memory import SIZE
from preblock.service.core.errors import Invalid
from preblock.service.core.results import ChunkedTensor, GpuTarget, Result
from preblock.service.core.shared_region import FLOAT32_BYTES, OpenRange
from preblock.service.runtime.cuda_memory import SESSION_GPU, DeviceMemory
from preblock.service.runtime.fused_embedding import guard_mapped_files


async def write_shared(answer: Result, infer: InferMessage, ranges: Mapping[str, OpenRange]) -> None:
    """Write each output of `ranges` into its range. Other requests run between the chunks.

    Raises:
        Invalid: a range is too small, or its file has become shorter; then the ranges may hold a part of the outputs.
        Unavailable: the system has no memory for a range, or the driver of a GPU cannot write it.

    """
    if not ranges:
        return
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
