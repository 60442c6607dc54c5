"""The sizes and the hash of n-gram embeddings. Imports no torch.

Letters: N layers, n largest number of tokens of an n-gram, H heads of a layer, E width of the embeddings of a layer.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from preblock.models.serialization import Count, Flag, Keys, Rule, Whole, check_fields

NGRAMS = "ngram_embeddings"
"""Name of the output."""
ROW_IDS = "ngram_row_ids"
"""Name of the output of their rows."""
CONTEXT = "context"
"""Name of the input with the n - 1 ids before each row."""
MAX_SIZE, MAX_HEADS, MAX_BASE = 16, 2**12, 2**31
"""Limits of n, of the heads of all layers, and of the smallest rows of a head: the search for primes stays short."""
_MASK = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LAYER_STRIDE = 10007


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """The sizes and the hash of n-gram embeddings, as in `qwen4_exp`.

    Each layer has a table. Each head of a layer hashes the 2 to n tokens that end at a token into rows of its own.

    Args:
        layers: numbers of the layers with a table, counted from 0.
        size: n; 2 or more.
        heads: heads for each n-gram size; a layer has H = heads * (n - 1).
        width: E; a row has E / H values.
        base: least rows of a head; every head of all layers has another prime number of rows.
        multiple: the rows of a table are padded to a multiple of it.
        seed: of the multipliers.
        reset_id: end-of-sequence id; an n-gram never reaches beyond it. It stands for every token before the first.
        referenced: whether the tables stay in the files of the checkpoint, so that a module has their row ids alone.
        weights: for each layer, names of the parts of its table in a checkpoint, in order.

    Raises:
        ValueError: a size is not allowed.

    """

    absent: ClassVar[tuple[str, ...]] = ("referenced",)

    layers: tuple[int, ...]
    size: Annotated[int, Rule(lambda size: type(size) is int and 2 <= size <= MAX_SIZE, f"2 to {MAX_SIZE}")]
    heads: Count
    width: Count
    base: Count
    multiple: Count
    seed: Whole
    reset_id: Whole
    referenced: Flag = False
    weights: tuple[tuple[Keys, ...], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "ngrams.")
        numbers = all(type(layer) is int and layer >= 0 for layer in self.layers)
        if not self.layers or not numbers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"ngrams.layers: got {list(self.layers)}, expected ascending numbers from 0 on")
        count = self.heads_of_layer * len(self.layers)
        if count > MAX_HEADS:
            raise ValueError(f"ngrams.heads: got {count} in all layers, expected at most {MAX_HEADS}")
        if self.base > MAX_BASE:
            raise ValueError(f"ngrams.base: got {self.base}, expected at most {MAX_BASE}")
        if self.width % self.heads_of_layer:
            raise ValueError(f"ngrams.width: got {self.width}, expected a multiple of {self.heads_of_layer} heads")

    @property
    def heads_of_layer(self) -> int:
        """H."""
        return self.heads * (self.size - 1)

    @property
    def history(self) -> int:
        """Number of tokens before a token that its embeddings depend on: n - 1."""
        return self.size - 1

    @cached_property
    def head_rows(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each head of each layer: the primes from `base` on, each once."""
        primes: list[int] = []
        candidate = self.base
        while len(primes) < len(self.layers) * self.heads_of_layer:
            if _is_prime(candidate):
                primes.append(candidate)
            candidate += 1
        count = self.heads_of_layer
        return tuple(tuple(primes[begin : begin + count]) for begin in range(0, len(primes), count))

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of the table of each layer, padding included."""
        return tuple(-(-sum(rows) // self.multiple) * self.multiple for rows in self.head_rows)

    def multipliers(self, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """Return n odd factors for each layer; the product with an id below `vocab_size` fits into int64."""
        bound = max(1, (2**63 - 1) // vocab_size // 2)
        return tuple(
            tuple(
                2 * (_splitmix64((self.seed + _LAYER_STRIDE * layer + _GOLDEN * (place + 1)) & _MASK) % bound) + 1
                for place in range(self.size)
            )
            for layer in range(len(self.layers))
        )


def _splitmix64(value: int) -> int:
    """Return the next number of the generator SplitMix64 (Steele et al. 2014) after the state `value`."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, math.isqrt(value) + 1))
