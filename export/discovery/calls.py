"""The calls of a library's model: to recognise its front-end, and to prove the result.

Letters: B batch, L length, V vocabulary, M maximum length.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

BATCHES = (1, 2, 5)
LENGTHS = (1, 2, 17)
LONGEST = 512
"""Longest row to compare without a table of positions, since a longer one proves no more."""
TABLE_LENGTH = 32
"""Length of the rows with every id of the vocabulary."""
MAX_CALL_VALUES = 2**22
"""Most values of the vectors of one call."""
SPECIAL_ENDINGS = ("_token_id", "_token_index", "_token_ids", "_id", "_index")


@dataclass(frozen=True)
class Call:
    """Inputs of a model, and their description for the parity report.

    Args:
        inputs: int64 tensors (B, L), by name.
        offset: tokens of each row before the compared ones.
        arguments: description.

    """

    inputs: Mapping[str, Tensor]
    arguments: dict[str, JsonValue]
    offset: int = 0


def special_ids(config: Any, vocab_size: int, found: set[int] | None = None) -> list[int]:
    """Return the ids in a configuration, such as the ids of masks, images and ends, in order."""
    ids = set() if found is None else found
    for key, value in (config if isinstance(config, dict) else config.to_dict()).items():
        if isinstance(value, dict):
            special_ids(value, vocab_size, ids)
        elif str(key).endswith(SPECIAL_ENDINGS):
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int and 0 <= number < vocab_size:
                    ids.add(number)
    return sorted(ids)


def ordinary_ids(vocab_size: int, excluded: Sequence[int]) -> Tensor:
    """Return up to 4096 ids, the first and the last among them, without the excluded ones."""
    ids = torch.linspace(0, vocab_size - 1, min(vocab_size, 4096), dtype=torch.float64).to(torch.int64)
    kept: Tensor = ids[~torch.isin(ids, torch.tensor(list(excluded), dtype=torch.int64))]
    return kept if kept.numel() else ids[:1]


def random_ids(ordinary: Tensor, batch: int, length: int) -> Tensor:
    """Return random ids (B, L), the same in every run."""
    generator = torch.Generator().manual_seed(1000 * batch + length)
    return ordinary[torch.randint(len(ordinary), (batch, length), generator=generator)]


def pad(ids: Tensor, padding: int | None, kind: str) -> tuple[Tensor, Tensor]:
    """Return the ids with padding in each row, and their mask; `kind` is left, right or inner.

    With the kind "mask", the mask is the one of "left", and the ids stay.
    """
    padded, mask = ids.clone(), torch.ones_like(ids)
    batch, length = ids.shape
    for row in range(batch):
        count = min(row + 1, length - 1)
        begin = {"left": 0, "mask": 0, "right": length - count, "inner": (length - count) // 2}[kind]
        mask[row, begin : begin + count] = 0
    if padding is not None and kind != "mask":
        padded[mask == 0] = padding
    return padded, mask


def grid(
    ordinary: Tensor, padding: int | None, accepted: Sequence[str], indices: Mapping[str, int], longest: int
) -> Iterator[Call]:
    """Yield plain and padded rows, rows with every further index, and continued rows.

    Args:
        ordinary: ids to choose from.
        padding: id of padding; None for none.
        accepted: inputs accepted by the model.
        indices: further indices of a token, and the number of their values.
        longest: length of the longest row.

    """
    for batch in BATCHES:
        for length in sorted({min(length, longest) for length in (*LENGTHS, *([longest] if batch == 1 else []))}):
            ids = random_ids(ordinary, batch, length)
            said: dict[str, JsonValue] = {"batch": batch, "length": length}
            yield Call({"input_ids": ids}, said)
            for name, count in indices.items():
                index = random_ids(torch.arange(count), batch, length)
                yield Call({"input_ids": ids, name: index}, {**said, "index": name})
            if length > 2:
                yield Call({"input_ids": ids}, {**said, "offset": length // 2}, length // 2)
                for kind in ("left", "right", "inner", "mask"):
                    padded, mask = pad(ids, padding, kind)
                    given = {"attention_mask": mask} if "attention_mask" in accepted else {}
                    yield Call({"input_ids": padded, **given}, {**said, "padding": kind})


def table_calls(vocab_size: int, excluded: Sequence[int], limit: int | None, width: int) -> Iterator[Call]:
    """Yield calls with every id of the vocabulary; an ordinary id replaces `excluded` ids."""
    length = min(limit or TABLE_LENGTH, TABLE_LENGTH)
    count = max(1, MAX_CALL_VALUES // (length * width)) * length
    substitute = ordinary_ids(vocab_size, excluded)[0]
    for begin in range(0, vocab_size, count):
        ids = torch.arange(begin, min(begin + count, vocab_size))
        ids[torch.isin(ids, torch.tensor(list(excluded), dtype=torch.int64))] = substitute
        rest = -len(ids) % length
        ids = torch.cat((ids, substitute.repeat(rest))).reshape(-1, length)
        yield Call({"input_ids": ids}, {"from_id": begin, "to_id": min(begin + count, vocab_size) - 1})


def special_call(ordinary: Tensor, special: int, limit: int | None) -> Call:
    """Return a call with a special id at the beginning, in the middle and at the end of ordinary ids."""
    length = min(limit or 9, 9)
    ids = random_ids(ordinary, 3, length)
    for row, place in enumerate((0, length // 2, length - 1)):
        ids[row, place] = special
    return Call({"input_ids": ids}, {"special_id": special})
