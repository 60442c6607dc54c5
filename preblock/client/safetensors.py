"""The safetensors format: the length of the header in 8 bytes, the header in JSON, and the values.

The safetensors library copies every tensor, and needs torch for bfloat16; hence this reader and writer.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.client.results import array_of

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "I64": "int64"}
METADATA = "__metadata__"


def write_safetensors(tensors: Mapping[str, NDArray[np.integer[Any]]]) -> bytes:
    """Return integer arrays in the safetensors format."""
    header, parts, end = {}, [], 0
    for name, tensor in tensors.items():
        values = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False).tobytes()
        begin, end = end, end + len(values)
        dtype = f"{tensor.dtype.kind.upper()}{8 * tensor.dtype.itemsize}"
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
        parts.append(values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def read_safetensors(body: bytearray) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors, in the memory of `body`, and the metadata.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: `body` is not in the format, or holds a dtype missing from
            `DTYPES`.

    """
    start = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:start])
    metadata = header.pop(METADATA)
    data = memoryview(body)[start:]
    tensors = {
        name: array_of(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]], entry["shape"])
        for name, entry in header.items()
    }
    return tensors, metadata
