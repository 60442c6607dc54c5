"""Finds what block 0 takes beside the vectors: content of the tokens or of the request, which an artifact would lack.

Masks, biases by distance, cosines and sines, and caches are no such content: attention has them of its own.
Letters: L length.
"""

from collections.abc import Set

import torch
from torch import Tensor

from preblock.export.discovery.model import BlockInput
from preblock.export.discovery.trace import Recorder

ROTATIONS = frozenset({"cos", "sin"})


def find_further_input(
    recorder: Recorder, first: BlockInput, second: BlockInput, trained: Set[str], length: int
) -> tuple[str, list[str]] | None:
    """Return the first argument of block 0 with content beside the vectors, and the tensors of the model behind it.

    Return None if there is none.

    Such an argument changes with the ids, or it has a row for each token that is computed from trained tensors. A copy
    of the vectors is none.

    Args:
        recorder: recorded the pass of `first`.
        first: the input of block 0 for some ids.
        second: the one for as many other ids, so that masks stay.
        trained: names of the trained tensors of the model.
        length: L of both passes.

    """
    for (name, tensor), (_, other) in zip(first.others, second.others, strict=False):
        if not tensor.numel() or _is_equal(tensor, first.vectors):
            continue
        changes = not _is_equal(tensor, other)
        sources = recorder.value_of(tensor).leaves(ROTATIONS) & trained
        if changes or (sources and tensor.ndim == 3 and length in tensor.shape[:2]):
            return name, sorted(sources)
    return None


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and torch.equal(tensor, other)
