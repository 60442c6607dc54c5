"""Rows made of parts over the Open Inference Protocol: the inputs `parts` and `vectors`.

Letters: B batch, L length, N given vectors, D width of a token vector.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from preblock.service.codecs.fields import format_value
from preblock.service.codecs.native_json import has_more_values, read_json
from preblock.service.codecs.parts import check_vectors, read_parts, refuse_beside_parts
from preblock.service.codecs.v2.metadata import PARTS, VECTORS
from preblock.service.codecs.v2.parameters import InferOptions
from preblock.service.core.errors import Invalid, Malformed, TooLarge, read_items
from preblock.service.core.types import PartsRequest, RowPart, VectorPlaceholder

Rows = tuple[tuple[RowPart, ...], ...]
ROW = "a list of parts in JSON, with each name of an object once"


def to_parts_request(
    texts: tuple[str, ...],
    tensors: Mapping[str, NDArray[Any]],
    options: InferOptions,
    wanted: Mapping[str, Any],
    max_values: int | None,
) -> PartsRequest:
    """Return a request of rows made of parts.

    Args:
        texts: the rows of the input `parts`; empty if `input_ids` hold the tokens, int64 (B, L).
        tensors: the other inputs, without offset and context.
        options: of the request.
        wanted: further arguments of the request.
        max_values: maximum values in the JSON of all rows; None for any number.

    Raises:
        Invalid: another input or option beside parts, or a value that is not allowed.
        TooLarge: the JSON has too many values.

    """
    own = {name: tensor for name, tensor in tensors.items() if name != VECTORS}
    given = {"truncate": wanted["truncate"], "pooling": None if wanted["pooling"] == "none" else wanted["pooling"]}
    refuse_beside_parts(own | given, (PARTS if texts else "input_ids", VECTORS, "offset", "context"))
    placeholder = _read_placeholder(tensors.get(VECTORS), options.placeholder_id)
    rows = (
        _read_rows(texts, max_values) if texts else tuple((RowPart("input_ids", ids=row),) for row in own["input_ids"])
    )
    return PartsRequest(rows=rows, placeholder=placeholder, sequence=options.sequence, **wanted)


def _read_placeholder(vectors: NDArray[Any] | None, token: int | None) -> VectorPlaceholder | None:
    """Return the token that stands for the vectors, float32 (N, D); None without both."""
    if token is None and vectors is None:
        return None
    if token is None or vectors is None:
        missing = "inputs" if vectors is None else "parameters.placeholder_id"
        message = (
            f"the input {VECTORS} and the parameter placeholder_id need each other: a token stands for the vectors"
        )
        raise Invalid(missing, "nothing", "a value", message=message)
    check_vectors(VECTORS, vectors)
    return VectorPlaceholder(token, RowPart(VECTORS, vectors=vectors.reshape(-1)))


def _read_rows(texts: tuple[str, ...], max_values: int | None) -> Rows:
    if max_values is not None and has_more_values(",".join(texts).encode(), max_values):
        raise TooLarge(PARTS, f"more than {max_values} JSON values", f"at most {max_values} JSON values")
    return read_parts(read_items(texts, _read_row))


def _read_row(number: int, text: str) -> list[Any]:
    try:
        document = read_json(b'{"parts":%b}' % text.encode())
    except Malformed as error:
        raise Invalid(f"{PARTS}[{number}]", format_value(text), ROW) from error
    row = document[PARTS] if document.keys() == {PARTS} else None
    if not isinstance(row, list):
        raise Invalid(f"{PARTS}[{number}]", format_value(text), ROW)
    return row
