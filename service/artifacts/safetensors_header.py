"""The header of a safetensors file. Source: the format's description in the README of huggingface/safetensors."""

import hashlib
import json
import os
from collections.abc import Mapping
from io import BufferedReader
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from preblock.service.core.errors import ArtifactError, unique_names

METADATA, ENTRY_FIELDS = "__metadata__", {"dtype", "shape", "data_offsets"}
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"U{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Types of tensors, by their names in a header."""


class StoredTensor(NamedTuple):
    """A tensor of a file: its type by its name in the header, its shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The SHA-256 of a header, length included, and the tensors by name."""

    sha256: str
    tensors: dict[str, StoredTensor]


def read_header(name: str, stream: BufferedReader) -> Header:
    """Return the header of the open file `stream`; `name` is the field of errors.

    Raises:
        ArtifactError: the file is no safetensors file, or its length is not that of its header and tensors.

    """
    size = os.fstat(stream.fileno()).st_size
    prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ArtifactError(name, f"a header of {length} bytes in {size}", "a safetensors file")
    content = stream.read(length)
    try:
        found = parse_header(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(name, f"an invalid header ({reason_of(error)})", "a safetensors file") from error
    if not cover(found, 8 + length, size):
        end = max((tensor.end for tensor in found.values()), default=8 + length)
        raise ArtifactError(name, f"{size} bytes", f"{end} bytes of header and consecutive tensors")
    return Header(hashlib.sha256(prefix + content).hexdigest(), found)


def parse_header(content: bytes) -> dict[str, StoredTensor]:
    """Return the tensors of a header by name, of any types and sizes; `content` follows the bytes of its length.

    Raises:
        ValueError, RecursionError: it is no JSON object of tensors.

    """
    if content[:1] != b"{":
        raise ValueError("a header that is no JSON object")
    document = json.loads(content.decode(), object_pairs_hook=unique_names)
    metadata = document.pop(METADATA, None)  # the library takes null for none
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ValueError(f"{METADATA} that is no text by name")
    return {name: _read_tensor(name, entry, 8 + len(content)) for name, entry in document.items()}


def reason_of(error: Exception) -> str:
    """Return the message of an error of `parse_header`; it may quote an unpaired surrogate, which is escaped."""
    return str(error).encode(errors="backslashreplace").decode()


def cover(tensors: Mapping[str, StoredTensor], begin: int, end: int) -> bool:
    """Return whether tensors hold each byte from `begin` to `end` once."""
    places = sorted((tensor.begin, tensor.end) for tensor in tensors.values())
    bounds = [(begin, begin), *places, (end, end)]
    return all(last == first for (_, last), (first, _) in pairwise(bounds))


def _read_tensor(name: str, entry: Any, start: int) -> StoredTensor:
    name.encode()  # an unpaired surrogate could not be quoted in a message
    if not isinstance(entry, dict) or entry.keys() != ENTRY_FIELDS:
        raise ValueError("a tensor with other fields than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError("a dtype that is no text, or a shape or data_offsets that are no sizes")
    if offsets[1] < offsets[0]:
        raise ValueError("data_offsets that end before they begin")
    return StoredTensor(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
