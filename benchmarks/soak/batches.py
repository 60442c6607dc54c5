"""Random batches: rows of ids with their positions."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.soak.common import Rows, Soak, Vectors

SIZES = ((4, 8), (8, 128), (8, 512), (32, 512))
CHANCES = (0.889, 0.1, 0.01, 0.001)
"""Largest numbers of rows and of tokens per row, and the probability of each pair."""
LARGE = 2048
"""Batches of at least so many tokens are sent one at a time."""


@dataclass(frozen=True)
class Batch:
    """Rows of ids.

    Args:
        ids: ids of each row.
        places: position index of each id.
        fields: request fields for these positions: `offset`, `position_ids`, `attention_mask`.
        parameters: sequence parameters of the Open Inference Protocol.

    """

    ids: Rows
    places: Rows
    fields: dict[str, Any]
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of tokens in all rows."""
        return sum(map(len, self.ids))

    @property
    def large(self) -> bool:
        """Whether the batch has at least `LARGE` tokens."""
        return self.size >= LARGE

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return len(set(map(len, self.ids))) > 1

    def shaped(self, vectors: Vectors) -> Vectors:
        """Return vectors (T, D) in the shape of answers: (B, L, D) if all rows have one length."""
        return vectors if self.ragged else vectors.reshape(len(self.ids), -1, vectors.shape[-1])

    def in_sequence(self, number: int, random: np.random.Generator) -> Iterator["Batch"]:
        """Yield the batch in parts, as the requests of sequence `number`."""
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
        """Return an invalid copy of the batch.

        Args:
            soak: state of the test, with the limits of the model.
            fields: whether the protocol has fields beside ids.
            random: random generator.

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
    """Return a random batch.

    Args:
        soak: state of the test, with the limits of the model.
        fields: whether the protocol has fields beside ids, for positions other than 0, 1, 2, …
        rectangular: whether all rows must have one length.
        random: random generator.

    """
    most, longest = SIZES[random.choice(len(SIZES), p=CHANCES)]
    # Large batches are rare, so they use the full number of rows and long rows.
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
    # Padding has position 0.
    found = [(mask * (at + np.cumsum(mask) - 1)).tolist() for at, mask in zip(offset, masks, strict=True)]
    return Batch(ids, found, {"offset": offset, "attention_mask": [mask.tolist() for mask in masks]})
