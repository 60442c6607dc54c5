"""Values of vLLM's field `prompt_embeds`: for each row the base64 of a file in the format of `torch.save`.

The file is a zip archive without compression. It holds a pickle, with the dtype and the shape (tokens, width) of a
tensor, and the values. The service writes the file without torch and never reads one. The same vectors give the same
bytes. As in the files of torch, the checksum follows the values, because these are computed while they are sent.
"""

import io
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.codecs.chunks import Base64Chunks, Buffer, LazyBytes, raw_bytes, split_buffer
from preblock.service.core.errors import Invalid
from preblock.service.core.types import ChunkedTensor, Int64, RowsRequest, Tensor, TokenRequest

PROMPT_EMBEDS = "prompt_embeds"
STORAGES = {"float32": b"FloatStorage", "float16": b"HalfStorage", "bfloat16": b"BFloat16Storage"}
PICKLE = (
    b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n("
    b"(X\7\0\0\0storagectorch\n%b\nX\1\0\0\0" + b"0X\3\0\0\0cpu%btQ"  # storage: type, name, device, number of values
    b"\x8a\1\0%b%b\x86%b\x8a\1\1\x86"  # first value 0, shape (tokens, width), strides (width, 1)
    b"\x89ccollections\nOrderedDict\n)RtR."  # requires_grad, backward_hooks
)
"""Template of a tensor's pickle, in opcodes of protocol 2: a call of `torch._utils._rebuild_tensor_v2`."""


def check_prompt_embeds(request: RowsRequest, manifest: Manifest) -> None:
    """Check that vLLM can use the requested vectors.

    Raises:
        Invalid: another output, a pooling, a mask, a model with an embedding scale unknown in vLLM, or a model that
            needs further inputs.

    """
    embeddings = manifest.token_embeddings
    outputs = () if embeddings is None else embeddings.prompt_outputs
    if not outputs:
        reason = f"it is unknown whether vLLM scales the embeddings of a {manifest.family}"
        if embeddings is not None and embeddings.beside:
            reason = f"a {manifest.family} needs {embeddings.arguments} too, and {PROMPT_EMBEDS} hold one tensor"
        raise Invalid("encoding", PROMPT_EMBEDS, f"base64, float, since {reason}")
    if len(request.outputs) != 1 or request.outputs[0] not in outputs:
        allowed = f"{' or '.join(outputs)} with the encoding {PROMPT_EMBEDS}"
        raise Invalid("output", list(request.outputs), allowed)
    if request.pooling != "none":
        raise Invalid("pooling", request.pooling, f"none with the encoding {PROMPT_EMBEDS}: a vector for each token")
    if isinstance(request, TokenRequest) and request.attention_mask is not None:
        allowed = f"nothing with the encoding {PROMPT_EMBEDS}, since a prompt has no padding"
        raise Invalid("attention_mask", "a value", allowed)


def write_prompt_embeds(tensor: Tensor, lengths: Int64) -> Base64Chunks | list[Base64Chunks]:
    """Write vectors (…, width) as one file for one row, or as a list of files, to be sent in order.

    Args:
        tensor: the vectors of all rows in order.
        lengths: int64 (B,), tokens of each row.

    """
    vectors, width = _Vectors(tensor), tensor.shape[-1]
    files = [
        Base64Chunks((torch_file((length, width), tensor.dtype, vectors.take(length)),)) for length in map(int, lengths)
    ]
    return files if len(files) > 1 else files[0]


class _Vectors:
    """Vectors in large arrays, taken in smaller arrays."""

    def __init__(self, tensor: Tensor) -> None:
        self._width, self._left = tensor.shape[-1], math.prod(tensor.shape[:-1])
        self._arrays = iter(tensor if isinstance(tensor, ChunkedTensor) else (tensor,))
        self._rest: NDArray[np.generic] = np.empty(0)

    def take(self, count: int) -> Iterator[NDArray[np.generic]]:
        """Yield the next `count` vectors in arrays (…, width)."""
        while count:
            if not len(self._rest):
                self._rest = next(self._arrays).reshape(-1, self._width)
            some, self._rest = self._rest[:count], self._rest[count:]
            count -= len(some)
            self._left -= len(some)
            if not self._left:
                next(self._arrays, None)  # lets the source finish
            yield some


def torch_file(shape: tuple[int, int], dtype: np.dtype[Any], values: Iterator[NDArray[np.generic]]) -> LazyBytes:
    """Return a file of a tensor for `torch.load`.

    Args:
        shape: (tokens, width).
        dtype: a value of `types.DTYPES`.
        values: C-contiguous arrays in order; they are computed when the file is sent.

    """
    return LazyBytes(_file_size(shape, dtype), _write_file(shape, dtype, values))


@lru_cache
def _file_size(shape: tuple[int, int], dtype: np.dtype[Any]) -> int:
    size = math.prod(shape) * dtype.itemsize
    return size + sum(map(len, _write_file(shape, dtype, iter(()), size)))


class _Output(io.RawIOBase):
    """An output without seek: it keeps the written buffers until they are taken, without a copy."""

    def __init__(self) -> None:
        self.position = 0
        self._buffers: list[Buffer] = []

    def write(self, buffer: Buffer) -> int:  # type: ignore[override]  # ZipFile writes nothing else
        self._buffers.append(buffer)
        self.position += len(buffer)
        return len(buffer)

    def tell(self) -> int:
        return self.position

    def take(self) -> Buffer:
        buffers, self._buffers = self._buffers, []
        return buffers[0] if len(buffers) == 1 else b"".join(buffers)


def _write_file(
    shape: tuple[int, int], dtype: np.dtype[Any], values: Iterator[NDArray[np.generic]], skipped: int = 0
) -> Iterator[Buffer]:
    """Yield the file, with the values uncopied; `skipped` is the number of bytes of left out values."""
    output, storage = _Output(), ZipInfo("archive/data/0")
    with ZipFile(output, "w") as archive:
        for name, content in (("data.pkl", _pickle(shape, dtype)), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(ZipInfo(f"archive/{name}"), content)
        with archive.open(storage, "w", force_zip64=True) as stream:
            yield output.take()
            for array in values:
                for view in split_buffer(raw_bytes(array)):
                    stream.write(view)
                    yield output.take()
            output.position += skipped
        storage.file_size += skipped
        storage.compress_size += skipped
    yield output.take()


def _pickle(shape: tuple[int, int], dtype: np.dtype[Any]) -> bytes:
    # Each number has eight bytes, so that all files of a dtype have the same number of bytes around the values.
    total, tokens, width = (b"\x8a\x08" + number.to_bytes(8, "little") for number in (math.prod(shape), *shape))
    return PICKLE % (STORAGES[dtype.name], total, tokens, width, width)
