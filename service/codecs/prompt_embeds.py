"""Values of vLLM's field `prompt_embeds`: for each row the base64 of a file in the format of `torch.save`.

The file is a zip archive without compression: a pickle that names a tensor (tokens, width), and its values. It is
written here byte by byte, so that nothing needs torch, and the same vectors are the same bytes. Nothing reads one. As
in torch's own, the checksum of the values stands behind them: they are computed while they are sent.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import TOKEN_EMBEDDINGS, Manifest
from preblock.service.codecs.chunks import Base64Chunks, Buffer, LazyBytes, raw_bytes, slices
from preblock.service.core.errors import Invalid, TooLarge
from preblock.service.core.results import ChunkedTensor, Tensor
from preblock.service.core.types import Int64, TextRequest, TokenRequest

PROMPT_EMBEDS = "prompt_embeds"
STORAGES = {"float32": b"FloatStorage", "float16": b"HalfStorage", "bfloat16": b"BFloat16Storage"}
LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
DESCRIPTOR = struct.Struct("<4s3I")
END = struct.Struct("<4s4H2IH")
FOLLOWS = 8
"""The flag of a file whose checksum and size stand in a descriptor behind it."""
MADE_BY, DATE = 20, 0x21
"""Version 2.0 of the zip format, and the first day that it knows, since the bytes may not depend on the day."""


def check_prompt_embeds(request: TokenRequest | TextRequest, manifest: Manifest) -> None:
    """Check that vLLM can use the requested vectors.

    Raises:
        Invalid: another output, a mask, or a model without `consumer_scales`.

    """
    told = manifest.token_embeddings
    if told is None or told.consumer_scales is None:
        allowed = f"base64, float, since it is not known what a {manifest.family} does to embeddings that it is handed"
        raise Invalid("encoding", PROMPT_EMBEDS, allowed)
    if request.outputs != (TOKEN_EMBEDDINGS,):
        raise Invalid("output", list(request.outputs), f"{TOKEN_EMBEDDINGS} with the encoding {PROMPT_EMBEDS}")
    if isinstance(request, TokenRequest) and request.attention_mask is not None:
        allowed = f"nothing with the encoding {PROMPT_EMBEDS}, since a prompt has no padding"
        raise Invalid("attention_mask", "a value", allowed)


def write_prompt_embeds(tensor: Tensor, lengths: Int64) -> Base64Chunks | list[Base64Chunks]:
    """Write vectors (…, width) of rows of `lengths`: one file for one row, a list for several, to be sent in turn.

    Raises:
        TooLarge: a row of more bytes than a zip archive without extensions holds.

    """
    vectors, width = _Vectors(tensor), tensor.shape[-1]
    files = [
        Base64Chunks((torch_file((length, width), tensor.dtype, vectors.take(length)),)) for length in map(int, lengths)
    ]
    return files if len(files) > 1 else files[0]


class _Vectors:
    """Vectors in large arrays, taken in smaller parts."""

    def __init__(self, tensor: Tensor) -> None:
        self._width, self._left = tensor.shape[-1], math.prod(tensor.shape[:-1])
        self._arrays = iter(tensor if isinstance(tensor, ChunkedTensor) else (tensor,))
        self._rest: NDArray[np.generic] = np.empty(0)

    def take(self, count: int) -> Iterator[NDArray[np.generic]]:
        """Yield the next `count`, (…, width)."""
        while count:
            if not len(self._rest):
                self._rest = next(self._arrays).reshape(-1, self._width)
            some, self._rest = self._rest[:count], self._rest[count:]
            count -= len(some)
            self._left -= len(some)
            if not self._left:
                next(self._arrays, None)  # tells the source that all are taken
            yield some


def torch_file(shape: tuple[int, int], dtype: np.dtype[Any], values: Iterator[NDArray[np.generic]]) -> LazyBytes:
    """Return a file of a tensor for `torch.load`.

    Args:
        shape: of the tensor, (tokens, width).
        dtype: of its values.
        values: C-contiguous arrays, one after another; they are taken when the file is sent.

    Raises:
        TooLarge: more bytes than a zip archive without extensions holds.

    """
    size, most = math.prod(shape) * dtype.itemsize, 2**32 - 1 - _around(dtype)
    if size > most:
        raise TooLarge("encoding", f"a row of {size} bytes", f"at most {most} bytes in {PROMPT_EMBEDS}")
    return LazyBytes(_around(dtype) + size, _file(shape, dtype, values))


@lru_cache
def _around(dtype: np.dtype[Any]) -> int:
    """Return how many bytes of a file are no values: as many for any shape, since every number has eight."""
    return sum(map(len, _file((0, 0), dtype, iter(()))))


def _file(shape: tuple[int, int], dtype: np.dtype[Any], values: Iterator[NDArray[np.generic]]) -> Iterator[Buffer]:
    """Yield the file, the values as they are."""
    files = {b"archive/data.pkl": _pickle(shape, dtype), b"archive/version": b"3\n", b"archive/byteorder": b"little"}
    before = directory = b""
    for name, content in files.items():
        entry = _entry(name, zlib.crc32(content), len(content))
        directory += CENTRAL.pack(b"PK\1\2", MADE_BY, *entry, 0, 0, 0, 0, len(before)) + name
        before += LOCAL.pack(b"PK\3\4", *entry) + name + content
    name, offset = b"archive/data/0", len(before)
    before += LOCAL.pack(b"PK\3\4", *_entry(name, 0, 0, FOLLOWS)) + name
    yield before
    checksum = size = 0
    for part in values:
        for view in slices(raw_bytes(part)):
            checksum = zlib.crc32(view, checksum)
            size += len(view)
            yield view
    entry = _entry(name, checksum, size, FOLLOWS)
    directory += CENTRAL.pack(b"PK\1\2", MADE_BY, *entry, 0, 0, 0, 0, offset) + name
    descriptor = DESCRIPTOR.pack(b"PK\7\10", checksum, size, size)
    begin, count = len(before) + size + len(descriptor), len(files) + 1
    yield descriptor + directory + END.pack(b"PK\5\6", 0, 0, count, count, len(directory), begin, 0)


def _entry(name: bytes, checksum: int, size: int, flags: int = 0) -> tuple[int, ...]:
    """Return the common part of both headers of a file; it is stored without compression, so its size stands twice."""
    return MADE_BY, flags, 0, 0, DATE, checksum, size, size, len(name), 0


def _pickle(shape: tuple[int, int], dtype: np.dtype[Any]) -> bytes:
    """Return the call that builds the tensor again, in the opcodes of protocol 2.

    `_rebuild_tensor_v2(storage, offset=0, size, stride, requires_grad=False, backward_hooks=OrderedDict())`.
    """
    rows, width = shape
    storage = _text("storage") + _name(b"torch", STORAGES[dtype.name]) + _text("0") + _text("cpu")
    return (
        b"\x80\x02"
        + _name(b"torch._utils", b"_rebuild_tensor_v2")
        + b"(("
        + storage
        + _integer(rows * width)
        + b"tQ"
        + _integer(0)
        + _integer(rows)
        + _integer(width)
        + b"\x86"
        + _integer(width)
        + _integer(1)
        + b"\x86\x89"
        + _name(b"collections", b"OrderedDict")
        + b")RtR."
    )


def _name(module: bytes, name: bytes) -> bytes:
    return b"c" + module + b"\n" + name + b"\n"


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def _integer(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little")
