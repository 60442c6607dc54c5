"""Truncation. Oracle: the longest legal prefix or suffix, found by trying each."""

import numpy as np
import pytest

from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.settings import RequestLimits
from preblock.service.core.types import TokenRequest, TokenRows
from preblock.service.engine.truncation import truncate
from preblock.service.engine.validation import check
from tests.support.manifests import tiny_manifest

M = 8
LIMITS = RequestLimits(1000, rows=1000, body_bytes=2**20, buffered_bytes=2**20)
SKIPPING = tiny_manifest().model_copy(update={"counts": "ids", "padding_id": 0})


def rows_of(rows: list[list[int]]) -> TokenRows:
    return TokenRows(np.concatenate(rows), np.array([len(row) for row in rows]))


def lists_of(rows: TokenRows) -> list[list[int]]:
    return [part.tolist() for part in np.split(rows.values, rows.starts[1:])]


def fitting(row: list[int], real: list[int], room: int, side: str) -> list[int]:
    """Return where the longest prefix, or suffix, of at most `room` real tokens stands."""
    ranges = [range(n) if side == "right" else range(len(row) - n, len(row)) for n in range(len(row) + 1)]
    return max(([*r] for r in ranges if sum(real[i] for i in r) <= room), key=len)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("manifest", [tiny_manifest(), SKIPPING], ids=["slots", "ids"])
def test_truncation_keeps_longest_fitting_part(side: str, masked: bool, manifest: Manifest) -> None:
    random, cut = np.random.default_rng(0), 0
    for _ in range(200):
        lengths = random.integers(1, 20, random.integers(1, 5))
        ids, masks, segments = ([random.integers(0, n, length).tolist() for length in lengths] for n in (11, 2, 2))
        offset = random.integers(0, M, len(ids))
        request = TokenRequest(
            input_ids=rows_of(ids),
            attention_mask=rows_of(masks) if masked else None,
            indices={"token_type_ids": rows_of(segments)},
            offset=offset,
            truncate=side,
        )
        check(request, manifest, LIMITS)
        found = truncate(request, manifest)
        kept = []
        for row, mask, start in zip(ids, masks, offset.tolist(), strict=True):
            real = [
                int((not masked or one) and not (manifest is SKIPPING and value == 0))
                for one, value in zip(mask, row, strict=True)
            ]
            kept.append(fitting(row, real, M - start, side))
            cut += len(row) - len(kept[-1])
        assert lists_of(found.input_ids) == [[row[i] for i in k] for row, k in zip(ids, kept, strict=True)]
        assert lists_of(found.indices["token_type_ids"]) == [
            [row[i] for i in k] for row, k in zip(segments, kept, strict=True)
        ]
        if found.attention_mask is not None:
            assert lists_of(found.attention_mask) == [[row[i] for i in k] for row, k in zip(masks, kept, strict=True)]
        check(found, manifest, LIMITS)
    assert cut


@pytest.mark.parametrize(("side", "kept"), [("left", [1, 5, 6, 2]), ("right", [1, 3, 4, 2])])
def test_truncation_keeps_special_tokens(side: str, kept: list[int]) -> None:
    request = TokenRequest(
        input_ids=rows_of([[1, 3, 4, 5, 6, 2]]),
        special=np.array([1, 0, 0, 0, 0, 1], np.bool_),
        spans=np.array([[0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [0, 0]]),
        offset=np.array([4]),
        truncate=side,
    )
    found = truncate(request, tiny_manifest())
    assert lists_of(found.input_ids) == [kept]
    assert found.spans is not None
    assert found.spans[:, 0].tolist() == [0, kept[1] - 3, kept[2] - 3, 0]
    assert found.special is not None
    assert found.special.tolist() == [True, False, False, True]


def test_nothing_is_truncated_without_need() -> None:
    endless = tiny_manifest().model_copy(update={"max_len": None})
    request = TokenRequest(input_ids=rows_of([[1] * 1000]), truncate="right")
    check(request, endless, LIMITS)
    assert truncate(request, endless).input_ids.lengths.tolist() == [1000]
