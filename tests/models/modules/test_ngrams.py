"""N-gram embeddings. Oracle: the functions and the module of transformers, with the sizes of the published model."""

from typing import Any

import pytest
from transformers.models.qwen4_exp import modeling_qwen4_exp as library

from preblock.models.config import FrontEndConfig
from preblock.models.modules.ngram_config import MAX_SIZE, NgramConfig
from preblock.models.steps import Positions, Tokens
from preblock.service.artifacts.manifest import MAX_HISTORY
from tests.models.rejections import rejection

SIZES: dict[str, Any] = {"layers": (1, 3), "size": 3, "heads": 2, "width": 16, "base": 40, "multiple": 8}
SIZES |= {"seed": 1234, "reset_id": 2}
TOKENS = Tokens(rows=99, width=4)
CONFIG = FrontEndConfig(family="q", steps=(TOKENS,), max_len=None, ngrams=NgramConfig(**SIZES))


def test_published_sizes_give_the_published_rows() -> None:
    """Qwen3.8-Flash-Next: one layer, 16 heads from 20 million rows on, 320,001,536 rows in all."""
    config = NgramConfig(**SIZES | {"layers": (1,), "heads": 8, "width": 2560, "base": 20_000_000, "multiple": 128})
    assert config.table_rows == (320_001_536,)
    assert config.head_rows[0][:2] == (
        library._find_nth_prime_after(19_999_999, 1),
        library._find_nth_prime_after(19_999_999, 2),
    )


@pytest.mark.parametrize(("vocab_size", "seed"), [(99, 1234), (248_320, 1234), (248_320, 7), (3, -5)])
def test_factors_are_those_of_transformers(vocab_size: int, seed: int) -> None:
    found = NgramConfig(**SIZES | {"seed": seed, "size": 5, "width": 16}).multipliers(vocab_size)
    for layer, factors in enumerate(found):
        assert list(factors) == library._build_layer_multipliers(vocab_size, 5, layer, seed).tolist()
        assert max(factors) * (vocab_size - 1) < 2**63


def test_invalid_ngram_sizes_are_rejected() -> None:
    sizes: list[tuple[dict[str, Any], str]] = [
        ({"layers": ()}, "ngrams.layers: got []"),
        ({"layers": (3, 1)}, "ngrams.layers: got [3, 1], expected ascending"),
        ({"size": 17}, "ngrams.size: got 17, expected 2 to 16"),
        ({"width": 15}, "ngrams.width: got 15, expected a multiple of 4 heads"),
        ({"reset_id": 1.0}, "ngrams.reset_id: got 1.0, expected a whole number"),
    ]
    for changed, message in sizes:
        assert message in rejection(ValueError, NgramConfig, **SIZES | changed), changed
    steps = (TOKENS, Positions(rows=9, counts="mask", first=1))
    found = rejection(ValueError, FrontEndConfig, family="q", steps=steps, max_len=8, ngrams=NgramConfig(**SIZES))
    assert "ngrams: got positions that count 'mask', expected 'slots'" in found


def test_manifest_allows_history_of_longest_ngram() -> None:
    assert MAX_HISTORY == MAX_SIZE - 1
