"""Requests at the limits of a model: V 11, M 8, S 2."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from preblock.service.codecs.native_json import read_embed
from preblock.service.core.errors import Invalid, TooLarge
from preblock.service.core.settings import RequestLimits
from preblock.service.core.types import StemRequest, TokenRequest, TokenRows
from preblock.service.engine.validation import check, check_stem
from tests.support.manifests import tiny_manifest, tiny_stem

LARGEST, SMALLEST = 2**63 - 1, -(2**63)
LIMITS = RequestLimits(20, rows=20, body_bytes=2**20, buffered_bytes=2**20)


def request(**fields: Any) -> TokenRequest:
    read = read_embed(fields).request
    assert isinstance(read, TokenRequest)
    return read


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": [[0, 0]], "token_type_ids": [[0, 1]]},
        {"input_ids": [[0, 0]], "position_ids": [[7, 0]]},
        {"input_ids": [[0] * 20], "position_ids": [[7] * 20]},
        {"input_ids": [[0, 0, 0]], "attention_mask": [[0, 1, 0]], "offset": 7},
        {"input_ids": [[0, 0]], "attention_mask": [[0, 0]], "offset": 8},
    ],
)
def test_requests_at_limits_are_accepted(fields: dict[str, Any]) -> None:
    check(request(**fields), tiny_manifest(), LIMITS)


@pytest.mark.parametrize(
    ("fields", "field", "got"),
    [
        ({"input_ids": [LARGEST]}, "input_ids[0]", f"{LARGEST}"),
        ({"input_ids": [[0, 0], [0]], "token_type_ids": [[0], [0, 0]]}, "token_type_ids[0]", "1 values"),
        ({"input_ids": [0], "attention_mask": [2]}, "attention_mask[0]", "2"),
        ({"input_ids": [0], "position_ids": [0, 1]}, "position_ids[0]", "2 values"),
        ({"input_ids": [[0], [0]], "offset": [0, SMALLEST]}, "offset[1]", f"{SMALLEST}"),
        ({"input_ids": [0, 0], "attention_mask": [1, 0], "offset": 8}, "offset[0] + tokens", "8 + 1 = 9"),
        ({"input_ids": [0, 0], "attention_mask": [0, 0], "offset": 9}, "offset[0] + tokens", "9 + 0 = 9"),
    ],
)
def test_request_beyond_limit_is_rejected(fields: dict[str, Any], field: str, got: str) -> None:
    with pytest.raises(Invalid) as refused:
        check(request(**fields), tiny_manifest(), LIMITS)
    assert (refused.value.field, refused.value.got) == (field, got)


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"needed": ("token_type_ids",)}, {}, "token_type_ids is missing: this model needs a value for each token"),
        ({"refused_ids": (0,)}, {}, r"input_ids\[0\]: got 0"),
    ],
)
def test_field_that_the_model_excludes_is_rejected(
    changes: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        check(request(input_ids=[0], **fields), tiny_manifest().model_copy(update=changes), LIMITS)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "input_ids: got an empty batch, expected at least one row"),
        ([1, 0, 1], r"input_ids\[1\]: got an empty row"),
    ],
)
def test_empty_rows_are_rejected(lengths: list[int], message: str) -> None:
    rows = TokenRows(np.zeros(sum(lengths), np.int64), np.array(lengths, np.int64))
    with pytest.raises(Invalid, match=message):
        check(TokenRequest(input_ids=rows), tiny_manifest(), LIMITS)


def test_max_tokens_counts_tokens_of_all_rows() -> None:
    check(request(input_ids=[[0] * 8] * 2), tiny_manifest(), replace(LIMITS, tokens=16))
    with pytest.raises(TooLarge, match="input_ids: got 16 tokens, expected at most 15 tokens in a request"):
        check(request(input_ids=[[0] * 8] * 2), tiny_manifest(), replace(LIMITS, tokens=15))


@pytest.mark.parametrize("field", ["output", "dtype", "pooling"])
def test_unknown_name_is_kept_in_no_cache(field: str) -> None:
    manifest, size = tiny_manifest(), 2**20
    tracemalloc.start()
    try:
        for number in range(8):
            with pytest.raises(Invalid):
                check(request(input_ids=[0], **{field: f"{number}" * size}), manifest, LIMITS)
        assert tracemalloc.get_traced_memory()[0] < 2 * size
    finally:
        tracemalloc.stop()


def test_images_are_counted_up_to_a_limit() -> None:
    images = StemRequest(values=np.zeros((2, 1, 4, 6), np.float32))
    assert check_stem(images, tiny_stem(), 14) == 14
    with pytest.raises(TooLarge, match="pixel_values: got 14 vectors, expected at most 13 vectors in an answer"):
        check_stem(images, tiny_stem(), 13)
    with pytest.raises(Invalid, match=r"pixel_values\.shape: got \[0, 1, 4, 4\]"):
        check_stem(replace(images, values=np.zeros((0, 1, 4, 4), np.float32)), tiny_stem(), 14)
