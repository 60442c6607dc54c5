"""Parameters of tensors in shared memory, the same over HTTP and gRPC.

Source: Triton, "System shared memory extension" and "CUDA shared memory extension".
"""

import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pybase64

from preblock.service.codecs.fields import format_value
from preblock.service.core.errors import Forbidden, Invalid
from preblock.service.runtime.cuda_memory import DeviceMemory
from preblock.service.runtime.session import INLINE_MAX_VALUES
from preblock.service.runtime.shared_memory import Region, RegionRange, SharedFile

REGION, OFFSET, SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
SHARED_MEMORY = (REGION, OFFSET, SIZE)
"""Parameters of an input or of a requested output."""

ReadShared = Callable[[Sequence[RegionRange]], Sequence[bytes]]
"""Returns copies of the bytes of ranges."""


def read_cost(size: int, shared: bool) -> int:
    """Return the cost of reading a message of `size` bytes; its inputs in shared memory may be much larger."""
    return max(size, INLINE_MAX_VALUES + 1) if shared else size


def refuse_shared(_: Sequence[RegionRange]) -> Sequence[bytes]:
    """Raise Forbidden: this reader has no regions."""
    raise Forbidden("shared memory", "a tensor in shared memory", "tensors in the request")


def read_range(where: str, parameters: Mapping[str, Any]) -> RegionRange | None:
    """Return the range in `parameters`; None without one.

    Raises:
        Invalid: a parameter is missing, or has a wrong type or value.

    """
    given = [name for name in SHARED_MEMORY if name in parameters]
    if not given:
        return None
    region = parameters.get(REGION)
    if not isinstance(region, str) or not region:
        got = "nothing" if region is None else format_value(region)
        raise Invalid(f"{where}.{REGION}", got, "the name of a registered region")
    size = _read_count(f"{where}.{SIZE}", parameters.get(SIZE), 1)
    return RegionRange(where, region, _read_count(f"{where}.{OFFSET}", parameters.get(OFFSET, 0), 0), size)


def _read_count(field: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise Invalid(field, "nothing" if value is None else format_value(value), f"an integer, {least} or more")
    return value


def range_parameters(item: RegionRange, size: int) -> dict[str, str | int]:
    """Return the parameters of a response output of `size` bytes in a range."""
    offset = {OFFSET: item.offset} if item.offset else {}
    return {REGION: item.region, **offset, SIZE: size}


def region_document(region: Region) -> dict[str, str | int]:
    """Return the status of a region."""
    memory = region.memory
    if isinstance(memory, SharedFile):
        return {"name": region.name, "key": memory.key, "offset": region.offset, "byte_size": region.size}
    assert isinstance(memory, DeviceMemory)
    return {"name": region.name, "device_id": memory.device_id, "byte_size": region.size}


def read_handle(value: Any) -> bytes:
    """Return the bytes of a CUDA IPC handle, {"b64": text}; raise Invalid for anything else."""
    text = value.get("b64") if isinstance(value, dict) and value.keys() == {"b64"} else None
    if not isinstance(text, str):
        raise Invalid("raw_handle", "nothing" if value is None else value, 'an object {"b64": text in base64}')
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Invalid("raw_handle.b64", text, "base64 with padding") from error
