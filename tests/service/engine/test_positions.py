"""Padded rows, in families of each of the three position sources: one pass, and token by token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from preblock.service.core.errors import Invalid
from preblock.service.core.types import EmbedResult, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from tests.support.artifacts import copy_artifact, draw_tables
from tests.support.engines import answer_of, open_engine

PAD, FIRST, LONGEST = 1, 2, 10
Counts = Literal["slots", "ids", "mask"]
COUNTS: tuple[Counts, ...] = ("slots", "ids", "mask")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Open a model of each position source, and one with a mask step and a refused id."""
    root = tmp_path_factory.mktemp("repository")
    for name in COUNTS:
        copy_artifact(f"counts-{name}", root, name)
    copy_artifact("masked", root)
    with open_engine(root) as engine:
        yield engine


def tables() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Draw the tables of tokens and positions again from their generator."""
    tokens, positions = draw_tables(3, [20 * 4, (LONGEST + FIRST) * 4])
    return tokens.reshape(-1, 4), positions.reshape(-1, 4)


def embed(
    engine: Engine, name: str, ids: NDArray[np.int64], mask: NDArray[np.int64] | None, offset: NDArray[np.int64]
) -> EmbedResult:
    request = TokenRequest(
        input_ids=TokenRows.of_array(ids),
        attention_mask=None if mask is None else TokenRows.of_array(mask),
        offset=offset,
    )
    return answer_of(engine, name, request)


def padded() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows padded on the left, on the right, in the middle, and not at all."""
    ids = np.array([[PAD, PAD, 4, 5, 6], [4, 5, 6, PAD, PAD], [4, PAD, 5, PAD, 6], [8, 9, 10, 11, 12]])
    return ids, (ids != PAD).astype(np.int64)


@pytest.mark.parametrize(
    ("name", "padding"), [("slots", FIRST), ("ids", FIRST - 1), ("mask", FIRST - 1), ("masked", None)]
)
def test_positions_count_preceding_real_tokens(engine: Engine, name: str, padding: int | None) -> None:
    """Padding has one position, as in the library, or vectors of zeros."""
    ids, mask = padded()
    offset = np.array([0, 1, 2, 3])
    answer = embed(engine, name, ids, mask, offset)
    tokens, positions = tables()
    index = offset[:, None] + mask.cumsum(1) - 1
    found = answer.arrays["embeddings"].reshape(4, 5, 4)
    np.testing.assert_array_equal(found[mask == 1], (tokens[ids] + positions[index + FIRST])[mask == 1])
    np.testing.assert_array_equal(answer.next_offset, offset + mask.sum(1))
    expected = np.zeros(4, np.float32) if padding is None else tokens[PAD] + positions[padding]
    np.testing.assert_array_equal(found[mask == 0], np.broadcast_to(expected, found[mask == 0].shape))


@pytest.mark.parametrize("name", [*COUNTS, "masked"])
def test_unequal_rows_equal_single_rows(engine: Engine, name: str) -> None:
    ids, mask = padded()
    lengths = np.array([5, 3, 1, 4])
    pieces = [(ids[row, :n], mask[row, :n]) for row, n in enumerate(lengths)]
    ragged = [TokenRows(np.concatenate(values), lengths) for values in zip(*pieces, strict=True)]
    request = TokenRequest(input_ids=ragged[0], attention_mask=ragged[1])
    together = answer_of(engine, name, request)
    alone = [embed(engine, name, row[None], marks[None], np.array([0])) for row, marks in pieces]
    expected = np.concatenate([answer.arrays["embeddings"][0] for answer in alone])
    np.testing.assert_array_equal(together.arrays["embeddings"], expected)
    np.testing.assert_array_equal(together.next_offset, np.concatenate([answer.next_offset for answer in alone]))


@pytest.mark.parametrize("name", [*COUNTS, "masked"])
def test_padded_row_token_by_token_equals_one_pass(engine: Engine, name: str) -> None:
    ids, mask = padded()
    whole, offset = embed(engine, name, ids, mask, np.array([0])), np.zeros(4, np.int64)
    for column, expected in enumerate(whole.arrays["embeddings"].reshape(4, 5, 4).swapaxes(0, 1)):
        step = embed(engine, name, ids[:, column : column + 1], mask[:, column : column + 1], offset)
        np.testing.assert_array_equal(step.arrays["embeddings"][:, 0], expected)
        offset = step.next_offset
    np.testing.assert_array_equal(offset, mask.sum(1))


def test_padding_ids_are_not_counted_without_mask(engine: Engine) -> None:
    ids, mask = padded()
    answer = embed(engine, "ids", ids, None, np.array([0]))
    np.testing.assert_array_equal(answer.next_offset, mask.sum(1))
    masked = embed(engine, "ids", ids, mask, np.array([0]))
    np.testing.assert_array_equal(answer.tensors["embeddings"], masked.tensors["embeddings"])


def test_max_len_counts_only_real_tokens(engine: Engine) -> None:
    ids = np.array([[PAD] * 5 + [4] * 5])
    mask = (ids != PAD).astype(np.int64)
    for name in (*COUNTS, "masked"):
        assert embed(engine, name, ids, mask, np.array([5])).next_offset == [10]
        with pytest.raises(Invalid, match="6 \\+ 5 = 11, expected at most 10"):
            embed(engine, name, ids, mask, np.array([6]))


@pytest.mark.parametrize(
    ("name", "mask", "real"),
    [
        ("ids", None, [[0, 2], [4]]),
        ("slots", None, [[0, 1, 2], [3, 4]]),
        ("slots", [0, 1, 1, 0, 1], [[1, 2], [4]]),
        ("ids", [0, 1, 1, 1, 1], [[2], [4]]),
    ],
)
def test_mean_ignores_padding(engine: Engine, name: str, mask: list[int] | None, real: list[list[int]]) -> None:
    lengths = np.array([3, 2])
    request = TokenRequest(
        input_ids=TokenRows(np.array([5, PAD, 6, PAD, 8]), lengths),
        attention_mask=None if mask is None else TokenRows(np.array(mask), lengths),
    )
    vectors = answer_of(engine, name, request).arrays["embeddings"]
    mean = answer_of(engine, name, replace(request, pooling="mean")).arrays["embeddings"]
    expected = np.stack([vectors[row].astype(np.float64).sum(0) / len(row) for row in real])
    assert mean.tobytes() == expected.astype(np.float32).tobytes()


def test_mean_of_row_without_real_token_is_rejected(engine: Engine) -> None:
    request = TokenRequest(input_ids=TokenRows(np.array([5, PAD]), np.array([1, 1])), pooling="mean")
    with pytest.raises(Invalid, match=r"input_ids\[1\]: got no real token, expected at least one, to take the mean"):
        answer_of(engine, "ids", request)
