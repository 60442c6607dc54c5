"""Outputs of the Open Inference Protocol beside the vectors: integers of each row, and the tokens of a text.

Letters: B batch, L length, T tokens of all rows.
"""

import numpy as np

from preblock.service.core.results import EmbedResult
from preblock.service.core.types import Int64

TEXT_OUTPUTS = ("input_ids", "spans")
"""Outputs of a request with text."""
ROW_OUTPUTS = ("lengths", "next_offset", "next_context", "position_delta", "truncated", *TEXT_OUTPUTS)
"""Names as in the native API. They are INT64, and metadata does not list them."""


def row_output(answer: EmbedResult, name: str) -> Int64:
    """Return an output of ROW_OUTPUTS.

    `lengths`, `next_offset`, `position_delta` and `truncated` are int64 (B,), `next_context` (B, H). `input_ids` is
    (B, L) and `spans` (B, L, 2), or (T,) and (T, 2) for rows of different lengths.
    """
    if name == "lengths":
        return answer.lengths
    if name == "next_offset":
        return answer.next_offset
    if name == "next_context":
        assert answer.next_context is not None
        return answer.next_context
    if name in ("position_delta", "truncated"):
        values: Int64 | None = getattr(answer, name)
        return np.zeros_like(answer.lengths) if values is None else values
    assert answer.input_ids is not None
    assert answer.spans is not None
    rows = answer.input_ids
    shape = (len(rows.values),) if rows.length is None else (len(rows.lengths), rows.length)
    return rows.values.reshape(shape) if name == "input_ids" else answer.spans.reshape(*shape, 2)
