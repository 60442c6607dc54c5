"""Checks of further indices of tokens, such as segments. Letters: B batch, L length."""

from collections.abc import Mapping

import torch
from torch import Tensor


def check_indices(family: str, known: Mapping[str, int], input_ids: Tensor, given: Mapping[str, Tensor]) -> None:
    """Check the indices `given` for `input_ids` (B, L) against the names and the numbers of legal values in `known`.

    Raises:
        ValueError: an index is unknown, of another shape than (1 or B, L), or out of range.

    """
    batch, length = input_ids.shape
    for name, index in given.items():
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(f"{name}: the front-end {family!r} has no such index, expected {allowed}")
        if torch.compiler.is_exporting():  # the exporter cannot follow a check on values
            continue
        if index.shape not in ((1, length), (batch, length)):
            expected = f"(1, {length}) or ({batch}, {length})"
            raise ValueError(f"{name}: got shape {tuple(index.shape)}, expected {expected}")
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < known[name]:
            got = int(index.min()) if int(index.min()) < 0 else int(index.max())
            raise ValueError(f"{name}: got {got}, expected 0 to {known[name] - 1}")
