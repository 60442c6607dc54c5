"""Random legal requests to the tiny models, and where their tokens stand."""

import numpy as np

from tests.support.protocols import Fields

LIMITS = {"bert": (11, 8, 2), "gpt": (7, 6, 0)}
"""V, M and S of the tiny models."""


def random_rows(random: np.random.Generator, lengths: list[int], limit: int) -> list[list[int]]:
    return [random.integers(0, limit, length).tolist() for length in lengths]


def random_request(random: np.random.Generator, model: str) -> Fields:
    """Return a legal request: rows of one length or of several, and any legal company of them."""
    vocab_size, max_len, segments = LIMITS[model]
    batch, length = int(random.integers(1, 5)), int(random.integers(1, max_len + 1))
    lengths = [length] * batch if random.random() < 0.6 else random.integers(1, max_len + 1, batch).tolist()
    fields: Fields = {"input_ids": random_rows(random, lengths, vocab_size)}
    if segments and random.random() < 0.5:
        fields["token_type_ids"] = random_rows(random, lengths, segments)
    if random.random() < 0.4:
        fields["attention_mask"] = random_rows(random, lengths, 2)
    kind = random.integers(0, 4)
    if kind == 0:
        fields["position_ids"] = random_rows(random, lengths, max_len)
    elif kind == 1:
        fields["offset"] = [int(random.integers(0, max_len - length + 1)) for length in lengths]
    elif kind == 2:
        fields["offset"] = int(random.integers(0, max_len - max(lengths) + 1))
    return fields


def positions_of(fields: Fields) -> list[list[int]]:
    """Return the position of every token, counted one by one; padding stands at 0."""
    if "position_ids" in fields:
        positions: list[list[int]] = fields["position_ids"]
        return positions
    positions, offset = [], fields.get("offset", 0)
    for index, row in enumerate(fields["input_ids"]):
        mask = fields["attention_mask"][index] if "attention_mask" in fields else [1] * len(row)
        position = offset[index] if isinstance(offset, list) else offset
        positions.append([])
        for real in mask:
            positions[-1].append(position if real else 0)
            position += real
    return positions
