"""Responses of the native API in the requested format."""

from functools import lru_cache

from preblock.service.api.http.negotiation import BYTES, JSON, NPY, SAFETENSORS
from preblock.service.api.http.response import ChunkedResponse
from preblock.service.codecs.arrays import npy_header
from preblock.service.codecs.chunks import Part, as_bytes
from preblock.service.codecs.native_json import MAX_HEADER_ROWS, build_document, write_json_parts
from preblock.service.codecs.output_uses import use_of
from preblock.service.codecs.prompt_embeds import PROMPT_EMBEDS
from preblock.service.codecs.safetensors import write_result
from preblock.service.core.types import EmbedResult, Result
from preblock.service.observability.context import Headers

TYPES = (JSON, BYTES, NPY, SAFETENSORS)
NOT_IN_NPY = ("bfloat16", "float8_e4m3fn")
"""Dtypes without a name in the format of `.npy`."""


def writable_types(dtype: str, encoding: str = "", fields_reason: str = "") -> tuple[tuple[str, ...], str]:
    """Return the possible content types of a response, and the reason against the others."""
    if encoding == PROMPT_EMBEDS:
        return (JSON,), f"with the encoding {PROMPT_EMBEDS}"
    if fields_reason:
        return (JSON, SAFETENSORS), fields_reason
    if dtype in NOT_IN_NPY:
        return (JSON, BYTES, SAFETENSORS), f"for {dtype}"
    return TYPES, ""


def respond(answer: Result, media: str, encoding: str) -> ChunkedResponse:
    """Encode a result in the content type `media`; `encoding` states how JSON holds the values."""
    if media == JSON:
        return ChunkedResponse(write_json_parts(build_document(answer, encoding)), media)
    if media == SAFETENSORS:
        return ChunkedResponse(write_result(answer), media)
    ((name, tensor),) = answer.tensors.items()
    parts: list[Part] = [npy_header(tensor.dtype, tensor.shape) if media == NPY else b"", as_bytes(tensor)]
    use = use_of(name, answer.lookup_use)
    headers = _headers(answer.model, answer.version, name, use, tensor.shape, tensor.dtype.name)
    return ChunkedResponse(parts, media, [*headers, *_row_headers(answer)])


@lru_cache  # clients repeat their shapes
def _headers(model: str, version: int, output: str, use: str, shape: tuple[int, ...], dtype: str) -> Headers:
    values = {
        b"preblock-model": model,
        b"preblock-version": str(version),
        b"preblock-output": output,
        b"preblock-use-as": use,
        b"preblock-shape": ",".join(map(str, shape)),
        b"preblock-dtype": dtype,
    }
    return [(name, value.encode("ascii")) for name, value in values.items()]


def _row_headers(answer: Result) -> Headers:
    """Return headers with a number for each row; one number stands for all rows, as in the request field `offset`.

    The next context has all ids of all rows.
    """
    if not isinstance(answer, EmbedResult):
        return []
    headers: list[tuple[bytes, bytes]] = []
    for name, values in answer.row_values.items():
        numbers = values[:1] if values.ndim == 1 and (values == values[0]).all() else values
        if numbers.size <= MAX_HEADER_ROWS and (name != "lengths" or answer.ragged):
            text = ",".join(map(str, numbers.ravel().tolist()))
            headers.append((f"preblock-{name.replace('_', '-')}".encode(), text.encode()))
    return headers
