"""The parts of a row, and vectors in place of token vectors.

Letters: N given vectors, T tokens of all rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RowPart(NamedTuple):
    """A part of a row: ids, or a text, or vectors, or a soft prompt.

    Args:
        field: place in the request, for error messages.
        ids: int64 (N,).
        text: without the special tokens of the tokenizer.
        vectors: float32, all values one after another.
        prompt: name of a soft prompt.

    """

    field: str
    ids: NDArray[np.int64] | None = None
    text: str | None = None
    vectors: NDArray[np.float32] | None = None
    prompt: str | None = None


class VectorPlaceholder(NamedTuple):
    """A token id, and the vectors in place of its tokens, in order."""

    token: int
    part: RowPart


class GivenVectors(NamedTuple):
    """Vectors in place of those of some tokens.

    Args:
        tokens: int64 (N,), number of each token among the T tokens of the request, ascending.
        values: float32 (N, width of a token vector).

    """

    tokens: NDArray[np.int64]
    values: NDArray[np.float32]

    def kept(self, tokens: NDArray[np.int64]) -> "GivenVectors | None":
        """Return the vectors of `tokens`, ascending numbers, numbered by their places there; None without any."""
        index = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        places = np.flatnonzero(self.tokens[index] == tokens)
        return GivenVectors(places, self.values[index[places]]) if len(places) else None
