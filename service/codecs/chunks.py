"""Response bodies in parts. Parts are never joined, and base64 is encoded while it is sent."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from preblock.service.core.types import ChunkedTensor, Tensor

Buffer = bytes | memoryview

CHUNK_BYTES = 3 * 2**18
"""Bytes of a chunk: a multiple of 3, because base64 encodes 3 bytes as 4 characters."""
MAX_CHUNK_BYTES = CHUNK_BYTES // 3 * 4
"""Size of a chunk in base64."""
MAX_JSON_VALUES = 2**14
"""Numbers written as text at once, in a few tenths of a millisecond. More are written while they are sent."""
MIN_WRITE_BYTES = 2**15
"""Larger buffers are sent alone; joining smaller buffers is faster than sending each."""
MAX_JOINED = 32
"""Most buffers joined into one chunk; each takes some microseconds."""


@dataclass(frozen=True)
class LazyBytes:
    """Bytes computed once, while they are sent.

    Args:
        size: number of bytes.
        buffers: the bytes in order.

    """

    size: int
    buffers: Iterator[Buffer]

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True)
class Base64Chunks:
    """Bytes to write as base64, part by part; its length is the length of the text."""

    parts: tuple[Buffer | ChunkedTensor | LazyBytes, ...]

    def __len__(self) -> int:
        return -(-sum(map(len, self.parts)) // 3) * 4


@dataclass(frozen=True)
class JsonFloats:
    """Values to write as JSON while they are sent; their length is unknown before.

    Args:
        values: arrays in order, finite, of any floating dtype, or of integers.
        shape: of the nested lists, at least (N,).

    """

    values: Iterable[NDArray[np.generic]]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LazyText:
    """JSON written while it is sent; its length is unknown before."""

    buffers: Iterator[Buffer]


Part = Buffer | Base64Chunks | ChunkedTensor | JsonFloats | LazyText


def body_size(parts: Iterable[Part]) -> int | None:
    """Return the number of bytes of a body, or None if a part has an unknown length."""
    size = 0
    for part in parts:
        if isinstance(part, JsonFloats | LazyText):
            return None
        size += len(part)
    return size


def raw_bytes(tensor: NDArray[np.generic]) -> memoryview:
    """Return the values as little-endian bytes, without a copy."""
    return tensor.reshape(-1).view(np.uint8).data


def split_buffer(buffer: Buffer) -> Iterator[memoryview]:
    """Yield views of at most CHUNK_BYTES bytes, without a copy; nothing for an empty buffer."""
    view = memoryview(buffer)
    if 0 < len(view) <= CHUNK_BYTES:
        return iter((view,))
    return (view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))


def base64_text(tensor: NDArray[np.generic]) -> bytes:
    """Return base64 of the values as little-endian bytes."""
    text: bytes = pybase64.b64encode(raw_bytes(tensor))
    return text


def as_bytes(tensor: Tensor) -> memoryview | ChunkedTensor:
    """Return the values as bytes; a chunked tensor stays chunked."""
    return tensor if isinstance(tensor, ChunkedTensor) else raw_bytes(tensor)


def join(parts: Iterable[Part]) -> bytes:
    """Return the whole body."""
    return b"".join(_encode_parts(parts))


def body_chunks(parts: Iterable[Part]) -> Iterator[Buffer]:
    """Yield a body in chunks: views of large parts without a copy, and small parts joined."""
    waiting: list[Buffer] = []
    size = 0
    for buffer in _encode_parts(parts):
        full = len(buffer) > MIN_WRITE_BYTES or size + len(buffer) > MAX_CHUNK_BYTES or len(waiting) == MAX_JOINED
        if waiting and full:
            yield b"".join(waiting)
            waiting, size = [], 0
        if len(buffer) > MIN_WRITE_BYTES:
            yield buffer
            del buffer  # lets the next buffer reuse the memory
        else:
            waiting.append(buffer)
            size += len(buffer)
    if waiting:
        yield b"".join(waiting)


def _encode_parts(parts: Iterable[Part]) -> Iterator[Buffer]:
    # Unlike a generator, chain and map keep no buffer, and run no Python code for each.
    return chain.from_iterable(map(_encode_part, parts))


def _encode_part(part: Part) -> Iterator[Buffer]:
    if isinstance(part, Base64Chunks):
        return encode_base64(part.parts)
    if isinstance(part, JsonFloats):
        return _write_floats(part)
    return part.buffers if isinstance(part, LazyText) else _split_part(part)


def _split_part(part: Buffer | ChunkedTensor | LazyBytes) -> Iterator[memoryview]:
    if isinstance(part, Buffer):
        return split_buffer(part)
    return chain.from_iterable(map(split_buffer, _buffers(part)))


def _buffers(part: ChunkedTensor | LazyBytes) -> Iterable[Buffer]:
    return map(raw_bytes, part) if isinstance(part, ChunkedTensor) else part.buffers


def encode_base64(parts: Iterable[Buffer | ChunkedTensor | LazyBytes]) -> Iterator[bytes]:
    """Yield the base64 of all parts in order, as of one buffer."""
    rest = b""
    for view in chain.from_iterable(map(_split_part, parts)):  # map keeps no reference to a part
        start = min(-len(rest) % 3, len(view))
        rest += view[:start]
        if len(rest) % 3:
            continue
        end = len(view) - (len(view) - start) % 3
        text = pybase64.b64encode(rest) + pybase64.b64encode(view[start:end])
        rest = bytes(view[end:])
        del view
        yield text
        del text
    if rest:
        yield pybase64.b64encode(rest)


def _write_floats(numbers: JsonFloats) -> Iterator[bytes]:
    """Yield the text of nested lists; the conversion from narrower dtypes to float32 is exact."""
    *rows, width = (*numbers.shape, 1) if len(numbers.shape) == 1 else numbers.shape
    inner = () if len(numbers.shape) == 1 else (width,)
    sizes = [math.prod(rows[level:]) for level in range(len(rows) + 1)]  # vectors in a list of each level, 1 at last
    most, done = max(1, MAX_JSON_VALUES // width), 0
    before = b"["
    for array in numbers.values:
        vectors = (array if array.dtype.kind == "i" else array.astype(np.float32, copy=False)).reshape(-1, width)
        while len(vectors):
            fits = min(most, len(vectors))
            # The outermost lists that fit are written at once: short ones cost more than their numbers.
            level = next(n for n, size in enumerate(sizes) if n and (size == 1 or (size <= fits and not done % size)))
            count = min(fits, sizes[level - 1] - done % sizes[level - 1]) // sizes[level] * sizes[level]
            some, vectors = vectors[:count].reshape(-1, *rows[level:], *inner), vectors[count:]
            text = orjson.dumps(some, option=orjson.OPT_SERIALIZE_NUMPY)
            before += b"[" * sum(done % size == 0 for size in sizes[1:level])
            done += count
            yield b"".join((before, memoryview(text)[1:-1], b"]" * sum(done % size == 0 for size in sizes[1:level])))
            before = b","
    yield b"]"
