"""The rule by which a library's model chooses the row of a position table.

Letters: B batch, L length.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class IndexRule(NamedTuple):
    """`counts` and `first` of a position step."""

    counts: Literal["slots", "ids", "mask"]
    first: int


def find_rule(calls: Sequence[tuple[Mapping[str, Tensor], Tensor]], padding: int | None) -> IndexRule | None:
    """Return the rule for the rows (1 or B, L) of every call; None if there is none.

    A call is its inputs by name, with `input_ids` (B, L), and the rows chosen by the model.
    """
    inputs, rows = calls[0]
    for counts in ("slots", "ids", "mask"):
        if counts == "ids" and padding is None:
            continue
        position = _positions(counts, inputs, padding)
        first = int(rows.reshape(-1)[0]) - int(position.reshape(-1)[0])
        if all(_agree(_positions(counts, given, padding) + first, found) for given, found in calls):
            lowest = 0 if counts == "slots" else 1
            return IndexRule(counts, first) if first >= lowest else None
    return None


def _positions(counts: str, inputs: Mapping[str, Tensor], padding: int | None) -> Tensor:
    """Return position indices (B, L); -1 where a token is not counted."""
    ids = inputs["input_ids"]
    real = torch.ones_like(ids)
    if counts == "ids" and padding is not None:
        real = ids.ne(padding).to(torch.int64)
    elif counts == "mask" and "attention_mask" in inputs:
        real = inputs["attention_mask"]
    return real.cumsum(1) * real - 1


def _agree(expected: Tensor, found: Tensor) -> bool:
    if found.numel() == expected.numel():
        return torch.equal(found.reshape(expected.shape), expected)
    rows = without_fill(found.reshape(1, -1) if found.ndim < 2 else found, expected)
    return rows.shape[-1] == expected.shape[-1] and bool((rows == expected).all())


def without_fill(index: Tensor, ids: Tensor) -> Tensor:
    """Return the indices of the tokens `ids` (B, L): some models fill a row up to a multiple of a window."""
    return index[:, : ids.shape[1]] if index.ndim == 2 and len(index) in (1, len(ids)) else index
