"""What the field `prompt_embeds` of vLLM's completions takes: base64 of a file that torch saved, for each row.

The file is a zip archive without compression: a pickle that names a tensor (tokens, width), and its values. It is
written here byte by byte, so that nothing needs torch, and the same vectors are the same bytes. Nothing reads one.
"""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from incipit.service.errors import Invalid, TooLarge
from incipit.service.manifest import TOKEN_EMBEDDINGS, Manifest
from incipit.service.messages import Int64, Request, TextRequest
from incipit.service.wire.content import Base64, Buffer, raw_bytes

PROMPT_EMBEDS = "prompt_embeds"
STORAGES = {"float32": b"FloatStorage", "float16": b"HalfStorage", "bfloat16": b"BFloat16Storage"}
LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
MADE_BY, DATE = 20, 0x21
"""Version 2.0 of the zip format, and the first day that it knows, since the bytes may not depend on the day."""


def check_prompt_embeds(request: Request | TextRequest, manifest: Manifest) -> None:
    """Check that a consumer takes what is asked for as what it is.

    Raises:
        Invalid: another output, a mask, or a model of which it is not known what its consumer adds.

    """
    told = manifest.token_embeddings
    if told is None or told.consumer_scales is None:
        allowed = f"base64, float, since it is not known what a {manifest.family} does to embeddings that it is handed"
        raise Invalid("encoding", PROMPT_EMBEDS, allowed)
    if request.outputs != (TOKEN_EMBEDDINGS,):
        raise Invalid("output", list(request.outputs), f"{TOKEN_EMBEDDINGS} with the encoding {PROMPT_EMBEDS}")
    if isinstance(request, Request) and request.attention_mask is not None:
        allowed = f"nothing with the encoding {PROMPT_EMBEDS}, since a prompt has no padding"
        raise Invalid("attention_mask", "a value", allowed)


def write_prompt_embeds(tensor: NDArray[np.generic], lengths: Int64) -> Base64 | list[Base64]:
    """Write vectors (…, width) of rows of `lengths`: one file for one row, a list for several.

    Raises:
        TooLarge: a row of more bytes than a zip archive without extensions holds.

    """
    rows = np.split(tensor.reshape(-1, tensor.shape[-1]), np.cumsum(lengths)[:-1])
    files = [Base64(torch_file(row)) for row in rows]
    return files if len(files) > 1 else files[0]


def torch_file(matrix: NDArray[np.generic]) -> tuple[Buffer, ...]:
    """Return the parts of a file that torch loads `matrix`, C-contiguous, from."""
    values = raw_bytes(matrix)
    if len(values) >= 2**32:
        raise TooLarge("encoding", f"a row of {len(values)} bytes", f"at most {2**32 - 1} bytes in {PROMPT_EMBEDS}")
    files: dict[bytes, Buffer] = {
        b"archive/data.pkl": _pickle(matrix),
        b"archive/version": b"3\n",
        b"archive/byteorder": b"little",
        b"archive/data/0": values,
    }
    local, directory, offset = b"", b"", 0
    for name, content in files.items():
        # Flags, method (stored), time and date; checksum, and the size twice, since nothing is compressed.
        common = (MADE_BY, 0, 0, 0, DATE, zlib.crc32(content), len(content), len(content), len(name), 0)
        head = LOCAL.pack(b"PK\3\4", *common) + name
        directory += CENTRAL.pack(b"PK\1\2", MADE_BY, *common, 0, 0, 0, 0, offset) + name
        local += head if content is values else head + content
        offset += len(head) + len(content)
    end = END.pack(b"PK\5\6", 0, 0, len(files), len(files), len(directory), offset, 0)
    return local, values, directory + end


def _pickle(matrix: NDArray[np.generic]) -> bytes:
    """Return the call that builds the tensor again, in the opcodes of protocol 2.

    `_rebuild_tensor_v2(storage, offset=0, size, stride, requires_grad=False, backward_hooks=OrderedDict())`.
    """
    rows, width = matrix.shape
    storage = _text("storage") + _name(b"torch", STORAGES[matrix.dtype.name]) + _text("0") + _text("cpu")
    return (
        b"\x80\x02"
        + _name(b"torch._utils", b"_rebuild_tensor_v2")
        + b"(("
        + storage
        + _integer(matrix.size)
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
