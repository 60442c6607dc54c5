"""Registration of regions of shared memory, the same over HTTP and gRPC."""

import asyncio
from functools import partial

from preblock.service.codecs.v2.metadata import CUDA_SHARED_MEMORY_EXTENSION, SHARED_MEMORY_EXTENSION
from preblock.service.core.shared_region import open_file
from preblock.service.engine.engine import Engine
from preblock.service.runtime.cuda_driver import has_driver
from preblock.service.runtime.cuda_memory import open_memory
from preblock.service.runtime.session import INLINE_MAX_VALUES


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
    if not engine.shared_memory.allowed:
        return ()
    # The driver starts at the first call.
    cuda = await asyncio.to_thread(has_driver)
    return (SHARED_MEMORY_EXTENSION, CUDA_SHARED_MEMORY_EXTENSION) if cuda else (SHARED_MEMORY_EXTENSION,)
