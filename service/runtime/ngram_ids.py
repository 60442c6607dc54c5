"""Row ids of n-gram tables by NumPy, with the bits of their graph, which takes about twice as long for one token.

Letters: B batch, L length, N layers, n ids of the longest n-gram, H heads of a layer.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest, NgramHash
from preblock.service.artifacts.names import CONTEXT, MANIFEST, NGRAM_IDS_GRAPH, NGRAM_ROW_IDS
from preblock.service.core.errors import ArtifactError
from preblock.service.core.types import Int64
from preblock.service.runtime.runner import Feeds, Runner


class NgramIds:
    """Computes the row ids.

    Args:
        hashing: of the last ids.
        reset_id: an n-gram never reaches beyond this id.

    """

    def __init__(self, hashing: NgramHash, reset_id: int) -> None:
        self._reset_id = reset_id
        self._factors = np.array(hashing.factors)
        self._rows = np.array(hashing.rows)
        of_heads = self._rows.reshape(len(self._rows), -1)
        self._begins = (np.cumsum(of_heads, axis=1) - of_heads).reshape(self._rows.shape)

    def run(self, feeds: Feeds, _: Sequence[str], /) -> dict[str, NDArray[Any]]:
        """Return the row ids, int64 (B, L, N, H), under their name."""
        ids = self._last_ids(feeds[CONTEXT], feeds["input_ids"])
        mixed = ids[:, :, None] * self._factors
        for place in range(1, ids.shape[2]):
            mixed[..., place] ^= mixed[..., place - 1]
        found = mixed[..., 1:, None] % self._rows
        found += self._begins
        return {NGRAM_ROW_IDS: found.reshape(*found.shape[:3], -1)}

    def _last_ids(self, context: Int64, ids: Int64) -> Int64:
        """Return the last ids up to each token, the token first, int64 (B, L, n)."""
        joined = np.concatenate((context, ids), axis=1)
        history, length = context.shape[1], ids.shape[1]
        last = np.empty((*ids.shape, history + 1), np.int64)
        for place in range(history + 1):
            begin = history - place
            last[:, :, place] = joined[:, begin : begin + length]
            if place > 1:
                np.copyto(last[:, :, place], self._reset_id, where=last[:, :, place - 1] == self._reset_id)
        return last


def open_ngram_ids(manifest: Manifest, graph: Runner) -> NgramIds:
    """Return a runner of the row ids by NumPy, with the hash of the manifest.

    Args:
        manifest: with `ngram_tables`.
        graph: runs `ngram.ids.onnx`.

    Raises:
        ArtifactError: the hash is missing, does not fit the history, or has other row ids than the graph.

    """
    hashing, history = manifest.ngram_hash, manifest.history
    field = f"{MANIFEST} ngram_hash"
    if hashing is None:
        raise ArtifactError(field, "nothing", f"the hash of {NGRAM_IDS_GRAPH}, since there are ngram_tables")
    if history is None:
        expected = f"the ids before a row of {NGRAM_IDS_GRAPH}, since there are ngram_tables"
        raise ArtifactError(f"{MANIFEST} history", "nothing", expected)
    _check_sizes(field, hashing, history.tokens + 1)
    found, random = NgramIds(hashing, history.reset_id), np.random.default_rng(0)
    ids = random.integers(0, manifest.vocab_size, (16, 16 + history.tokens))
    ids[random.random(ids.shape) < 0.2] = history.reset_id
    feeds = {CONTEXT: ids[:, : history.tokens], "input_ids": ids[:, history.tokens :]}
    feeds = {name: np.ascontiguousarray(values) for name, values in feeds.items()}
    ours, theirs = (runner.run(feeds, [NGRAM_ROW_IDS])[NGRAM_ROW_IDS] for runner in (found, graph))
    if not np.array_equal(ours, theirs):
        message = f"{field}: the hash gives other row ids than {NGRAM_IDS_GRAPH}"
        raise ArtifactError(field, "a hash", f"the hash of {NGRAM_IDS_GRAPH}", message=message)
    return found


def _check_sizes(field: str, hashing: NgramHash, size: int) -> None:
    """Check that the numbers fit into arrays, for n-grams of up to `size` ids."""
    factors = [len(layer) for layer in hashing.factors]
    rows = [len(layer) + 1 for layer in hashing.rows]
    if factors != rows or set(rows) != {size}:
        raise ArtifactError(field, f"factors of {factors} ids and rows of {rows} ids", f"{size} ids for each layer")
    heads = sorted({len(heads) for layer in hashing.rows for heads in layer})
    if len(heads) != 1 or heads == [0]:
        raise ArtifactError(field, f"heads of {heads} rows", "one number of heads for all layers and ids")
    largest = max(chain(*hashing.factors))
    if largest >= 2**63:
        raise ArtifactError(field, largest, f"1 to {2**63 - 1}")
