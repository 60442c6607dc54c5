"""What is asked for at once: rows of ids, drawn at random, and where they are."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.soak.shared import Rows, Soak, Vectors

SIZES = ((4, 8), (8, 128), (8, 512), (32, 512))
CHANCES = (0.889, 0.1, 0.01, 0.001)
"""Most rows and most tokens of a row, and how often."""
LARGE = 2048
"""Tokens, from which on the answer is one of those that are sent while the others wait."""


@dataclass(frozen=True)
class Batch:
    """Rows of ids.

    Args:
        ids: of each row.
        places: the position index of each.
        fields: what says so: `offset`, `position_ids`, `attention_mask`.
        parameters: of the sequence that they belong to, in the Open Inference Protocol.

    """

    ids: Rows
    places: Rows
    fields: dict[str, Any]
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.ids))

    @property
    def large(self) -> bool:
        """Whether it has so many that one at a time is enough."""
        return self.size >= LARGE

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return len(set(map(len, self.ids))) > 1

    def shaped(self, vectors: Vectors) -> Vectors:
        """Return vectors (T, D) as answers have them: (B, L, D) where rows have one length."""
        return vectors if self.ragged else vectors.reshape(len(self.ids), -1, vectors.shape[-1])

    def in_sequence(self, number: int, random: np.random.Generator) -> Iterator["Batch"]:
        """Yield it in parts, that a sequence of this id is fed one after another."""
        cuts = sorted(random.integers(1, len(self.ids[0]), random.integers(1, 4)))
        spans = [(int(begin), int(end)) for begin, end in zip([0, *cuts], [*cuts, len(self.ids[0])], strict=True)]
        spans = [span for span in spans if span[0] < span[1]]
        for begin, end in spans:
            ids, places = ([row[begin:end] for row in rows] for rows in (self.ids, self.places))
            parameters: dict[str, Any] = {"sequence_id": number}
            if begin == 0:
                parameters["sequence_start"] = True
            if (begin, end) == spans[-1]:
                parameters["sequence_end"] = True
            yield Batch(ids, places, {} if begin else self.fields, parameters)

    def spoiled(self, soak: Soak, fields: bool, random: np.random.Generator) -> "Batch":
        """Return it with something that is not allowed.

        Args:
            soak: knows what is.
            fields: whether the protocol has any beside ids.
            random: draws.

        """
        kind = random.integers(4 if fields else 3)
        if kind == 0:
            return replace(self, fields=self.fields | {"nope": self.ids})
        if kind == 3:
            return replace(self, fields={"offset": [soak.limit + 1 - len(row) for row in self.ids]})
        ids = [list(row) for row in self.ids]
        row = ids[random.integers(len(ids))]
        row[random.integers(len(row))] = soak.vocabulary if kind == 1 else -1
        return replace(self, ids=ids)


def draw(soak: Soak, fields: bool, rectangular: bool, random: np.random.Generator) -> Batch:
    """Return rows of ids.

    Args:
        soak: knows which are allowed.
        fields: whether the protocol has any beside ids, so that rows may be anywhere.
        rectangular: whether all must have one length.
        random: draws.

    """
    most, longest = SIZES[random.choice(len(SIZES), p=CHANCES)]
    # The larger sizes are whole, or nearly, since there are few of them.
    rows = int(random.integers(1, most + 1)) if longest < 512 else most
    lengths = random.integers(1 if longest < 512 else longest // 2, longest + 1, rows)
    if rectangular or random.random() < 0.3:
        lengths[:] = longest if longest == 512 else lengths[0]
    ids = [random.integers(0, soak.vocabulary, length).tolist() for length in lengths]
    kind = random.choice(("none", "offset", "position_ids", "attention_mask"), p=(0.3, 0.4, 0.15, 0.15))
    if not fields or kind == "none":
        return Batch(ids, [list(range(length)) for length in lengths], {})
    if kind == "position_ids":
        places = [random.integers(0, soak.limit, length).tolist() for length in lengths]
        return Batch(ids, places, {"position_ids": places})
    offset = [int(random.integers(0, soak.limit - length + 1)) for length in lengths]
    if kind == "offset":
        places = [list(range(at, at + length)) for at, length in zip(offset, lengths, strict=True)]
        return Batch(ids, places, {"offset": offset})
    masks = [(random.random(length) < 0.8).astype(int) for length in lengths]
    # Padding stands at position 0.
    found = [(mask * (at + np.cumsum(mask) - 1)).tolist() for at, mask in zip(offset, masks, strict=True)]
    return Batch(ids, found, {"offset": offset, "attention_mask": [mask.tolist() for mask in masks]})
