"""JSON responses of the native API."""

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from preblock.service.codecs.chunks import MAX_JSON_VALUES, Base64Chunks, JsonFloats, LazyText, Part, as_bytes, join
from preblock.service.codecs.output_uses import use_of
from preblock.service.codecs.prompt_embeds import PROMPT_EMBEDS, write_prompt_embeds
from preblock.service.core.errors import Invalid
from preblock.service.core.types import ChunkedTensor, EmbedResult, Result, Tensor

BASE64_PLACEHOLDER, FLOATS_PLACEHOLDER = orjson.Fragment(b'"\0"'), orjson.Fragment(b"\0")
"""Placeholders of base64 and of numbers in a document. Serialized JSON never holds a zero byte."""
TEXT_COPIES = 12
"""Memory of values, their text and three copies of the text, in sizes of the values as float32."""


def build_document(answer: Result, encoding: str) -> dict[str, Any]:
    """Return a result as a document for `write_json`: one output under its name, or several under `outputs`."""
    document: dict[str, Any] = {
        "model": answer.model,
        "version": answer.version,
        "dtype": answer.dtype,
        "encoding": encoding,
    }
    written = {name: _encode_tensor(answer, tensor, encoding) for name, tensor in answer.tensors.items()}
    if len(written) == 1:
        ((name, tensor),) = answer.tensors.items()
        use = use_of(name, answer.lookup_use)
        document |= {"dtype": tensor.dtype.name, "use_as": use, "shape": tensor.shape, name: written[name]}
    else:
        document["outputs"] = {
            name: {
                "use_as": use_of(name, answer.lookup_use),
                "dtype": answer.tensors[name].dtype.name,
                "shape": answer.tensors[name].shape,
                "data": data,
            }
            for name, data in written.items()
        }
    if isinstance(answer, EmbedResult):
        document["next_offset"] = answer.next_offset
        if answer.next_context is not None:
            document["next_context"] = answer.next_context
        if answer.position_delta is not None:
            document["position_delta"] = answer.position_delta
        if answer.ragged:
            document["lengths"] = answer.lengths
        if answer.truncated is not None:
            document["truncated"] = answer.truncated
        if answer.input_ids is not None and answer.spans is not None:
            ends = answer.input_ids.starts[1:]
            document |= {"input_ids": np.split(answer.input_ids.values, ends), "spans": np.split(answer.spans, ends)}
    return document


def _encode_tensor(answer: Result, tensor: Tensor, encoding: str) -> Any:
    if encoding == PROMPT_EMBEDS and isinstance(answer, EmbedResult):
        return write_prompt_embeds(tensor, answer.lengths)
    if encoding == "base64":
        return to_base64(tensor)
    return to_json_numbers(tensor)


def write_json_parts(document: Any) -> list[Part]:
    """Write a document or an array in parts; base64 and many values are written while they are sent."""
    values: list[Base64Chunks | JsonFloats | LazyText] = []

    def mark(value: object) -> orjson.Fragment:
        if not isinstance(value, Base64Chunks | JsonFloats | LazyText):
            raise TypeError(type(value).__name__)
        values.append(value)
        return BASE64_PLACEHOLDER if isinstance(value, Base64Chunks) else FLOATS_PLACEHOLDER

    text = orjson.dumps(document, mark, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS)
    if not values:  # avoids a copy of several megabytes
        return [text]
    before, *others = text.split(b"\0")
    return [before, *(part for pair in zip(values, others, strict=True) for part in pair)]


def write_json(document: dict[str, Any]) -> bytes:
    """Write a document with its arrays as one `bytes`."""
    return join(write_json_parts(document))


def to_base64(tensor: Tensor) -> Base64Chunks:
    """Return the values as a JSON string in base64 of little-endian bytes."""
    return Base64Chunks((as_bytes(tensor),))


def to_json_numbers(tensor: Tensor) -> NDArray[np.generic] | JsonFloats:
    """Return the values as JSON numbers; many are written while they are sent, and computed ones are checked before.

    Raises:
        Invalid: a value is infinite or NaN.

    """
    if not isinstance(tensor, ChunkedTensor):
        check_finite(tensor)
    return write_numbers(tensor)


def check_finite(tensor: NDArray[np.generic]) -> None:
    """Raise Invalid if a value is infinite or NaN."""
    if tensor.dtype.kind != "i" and not np.isfinite(_widen(tensor)).all():
        raise Invalid("encoding", "float", "base64, since JSON cannot hold an infinite value or NaN")


def write_numbers(tensor: Tensor, shape: tuple[int, ...] | None = None) -> NDArray[np.generic] | JsonFloats:
    """Return finite values, in another `shape` if it is given, as JSON numbers; many are written while they are sent.

    The text of a value takes several times its memory.
    """
    shape = tensor.shape if shape is None else shape
    if isinstance(tensor, ChunkedTensor):
        return JsonFloats(tensor, shape)
    return JsonFloats((tensor,), shape) if tensor.size > MAX_JSON_VALUES else _widen(tensor.reshape(shape))


def _widen(tensor: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return integers unchanged, and other values as float32; the conversion from narrower dtypes is exact."""
    return tensor if tensor.dtype.kind == "i" else tensor.astype(np.float32, copy=False)
