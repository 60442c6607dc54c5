"""Rows made of parts: token ids, texts and vectors, for `embed`, `prompt_embeds` and the steps of a decode stream.

Letters: N vectors, D width of a token vector.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from preblock.client.errors import invalid
from preblock.client.token_ids import Row, TensorLike, read_integers, to_plain

Given = NDArray[np.floating[Any]] | TensorLike
"""Vectors in place of token vectors: finite floats (N, D), sent as float32."""


class Part(TypedDict, total=False):
    """A part of a row: exactly one of these keys.

    Keys:
        input_ids: token ids.
        text: a text; its tokens have no special tokens.
        vectors: floats (N, D), in place of N token vectors.
        soft_prompt: name of a soft prompt in the artifact.

    """

    input_ids: Row
    text: str
    vectors: Given
    soft_prompt: str


class Placeholder(TypedDict):
    """A token id, and the vectors in place of its tokens, in order over all rows.

    Keys:
        token_id: may lie beyond the vocabulary.
        vectors: floats (N, D), one for each such token in the ids and texts of the parts.

    """

    token_id: int
    vectors: Given


Parts = Sequence[Part | Sequence[Part]]
"""The parts of one row, or of each row."""


def write_parts(parts: Parts | None, placeholder: Placeholder | None) -> dict[str, Any]:
    """Return the fields `parts` and `placeholder` of a JSON request, without missing ones.

    Raises:
        RequestError: vectors are no floats (N, D), or ids no 64-bit integers.

    """
    fields: dict[str, Any] = {}
    if parts is not None:
        fields["parts"] = [_write(f"parts[{index}]", item) for index, item in enumerate(parts)]
    if placeholder is not None:
        fields["placeholder"] = _write("placeholder", placeholder)
    return fields


def _write(field: str, item: Any) -> Any:
    """Return a part, a placeholder, or a row of parts for JSON. The service refuses any other value."""
    if isinstance(item, Mapping):
        return {key: _write_value(f"{field}.{key}", key, value) for key, value in item.items()}
    if isinstance(item, Sequence) and not isinstance(item, str):
        return [_write(f"{field}[{index}]", part) for index, part in enumerate(item)]
    return item


def _write_value(field: str, key: str, value: Any) -> Any:
    if key == "vectors":
        return _write_vectors(field, value)
    return read_integers(field, value).tolist() if key == "input_ids" else value


def _write_vectors(field: str, vectors: Any) -> str:
    """Return floats (N, D) as base64 of little-endian float32."""
    if str(getattr(vectors, "dtype", "")) == "torch.bfloat16":
        vectors = vectors.float()  # NumPy has no such type
    array = np.asarray(to_plain(field, vectors))
    floats = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    if not floats or array.ndim != 2 or not (array.size or field == "placeholder.vectors"):  # no token may need one
        raise invalid(field, f"{array.dtype} of shape {array.shape}", "floats of shape (vectors, width)")
    with np.errstate(over="ignore"):  # the service refuses infinite values
        return base64.b64encode(array.astype("<f4").tobytes()).decode()
