"""The grid of calls to compare a graph with its reference: shapes, offsets and paddings.

Letters: B batch, L length, M maximum length, Q query length, K key length.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from preblock.export.reference import Described, ngram_row_ids
from preblock.models.modules.bias import RelativeSinusoidConfig
from preblock.models.modules.signature import Signature
from preblock.service.artifacts.names import CONTEXT, NGRAM_ROW_IDS

BATCHES = (1, 2, 5)
LENGTHS = (1, 2, 17)
MAX_CASE_VALUES = 2**23
"""Most values of an output of several rows; longer rows are shortened to fit."""
UNLIMITED_LENGTH = 512
"""Longest row without a table of positions to set a limit."""
ID_WINDOW_VALUES = 2**23
"""Values of the token table used by one case, besides the first and the last row."""
LOOKUP_CHUNK_VALUES = 2**20
"""Values of a lookup computed at once."""
PADDINGS: tuple[Literal["none", "left", "right"], ...] = ("none", "left", "right")
LONG, FAR = 5000, 10**6
BIAS_GRID: tuple[tuple[int, int, int], ...] = (
    *((0, length, length) for length in (0, 1, 2, 17, 256)),  # the whole at once
    *((past, 1, past + 1) for past in (1, 17, 127, 128, LONG)),  # a step with a cache
    *((5, 3, 8), (100, 28, 128), (LONG, 16, LONG + 16)),  # a chunk
    *((0, 1, LONG), (0, 3, 40), (40, 3, 7), (FAR, 2, 40)),  # keys with another end
    *((4, 0, 4), (4, 2, 0)),
)
"""query_offset, Q and K of each case of a bias."""


class GridCase(NamedTuple):
    """The arguments of one comparison; with `segments`, every further index is random instead of omitted."""

    batch: int
    length: int
    offset: tuple[int, ...]
    segments: bool
    padding: Literal["none", "left", "right"]


def grid(signature: Signature) -> Iterator[GridCase]:
    """Yield all legal combinations."""
    most = longest(signature)
    for batch in BATCHES:
        fits = most if batch == 1 else max(LENGTHS[-1], MAX_CASE_VALUES // (batch * signature.width))
        for length in sorted({min(length, most, fits) for length in (*LENGTHS, most)}):
            last = (signature.max_len or UNLIMITED_LENGTH) - length
            offsets: list[tuple[int, ...]] = [(offset,) for offset in sorted({0, min(1, last), last})]
            if batch > 1:
                offsets.append(tuple(int(offset) for offset in np.linspace(0, last, batch)))
            for offset in offsets:
                for segments in (False,) if not signature.indices else (True,) if signature.needed else (False, True):
                    for padding in PADDINGS if signature.counts == "ids" or signature.needs_mask else PADDINGS[:1]:
                        yield GridCase(batch, length, offset, segments, padding)


def longest(signature: Signature) -> int:
    """Return the longest row to compare.

    Without a table of positions, a long row proves no more than a short one. Computed positions after a table are
    reached from its end.
    """
    return min(signature.max_len or UNLIMITED_LENGTH, max(signature.rows, UNLIMITED_LENGTH))


def feeds_of(signature: Signature, case: GridCase) -> dict[str, NDArray[np.int64]]:
    """Return the inputs of a case: random, but the same in every run."""
    vocab_size, shape = signature.vocab_size, (case.batch, case.length)
    generator = np.random.Generator(np.random.PCG64([*shape, *case.offset]))
    excluded = {*signature.refused_ids, signature.padding_idx} - {None}
    legal = np.setdiff1d(np.arange(vocab_size), list(excluded), assume_unique=True)  # else it searches for duplicates
    legal = legal if legal.size else np.arange(vocab_size)  # padding is the only id
    # Each case reads another part of a huge table, to keep the mapped pages in memory few.
    window = min(len(legal), ID_WINDOW_VALUES // signature.width)
    begin = int(generator.integers(0, len(legal) - window + 1)) if window < len(legal) else 0
    ids = generator.choice(legal[begin : begin + window], shape)
    # Every case has the first and the last id, to find off-by-one errors in the table.
    if ids.size:
        ids[0, 0], ids[-1, -1] = legal[0], legal[-1]
    real = np.ones(shape, np.int64)
    for row in range(case.batch):
        padded = min(row + 1, case.length) if case.padding != "none" else 0
        real[row, slice(0, padded) if case.padding == "left" else slice(case.length - padded, None)] = 0
    if signature.padding_idx is not None and signature.counts == "ids":
        ids[real == 0] = signature.padding_idx
    feeds = {"input_ids": ids, "offset": np.array(case.offset)}
    for name, count in signature.indices.items():
        feeds[name] = generator.integers(0, count, shape) if case.segments else np.zeros_like(ids)
    if signature.needs_mask:
        feeds["attention_mask"] = real
    if signature.history:
        # A third of the ids ends a sequence, in every place of the n-grams.
        feeds[CONTEXT] = generator.choice(legal, (case.batch, signature.history))
        for given in (ids, feeds[CONTEXT]):
            given[generator.random(given.shape) < 1 / 3] = signature.reset_id
    return feeds


def arguments_of(case: GridCase) -> dict[str, JsonValue]:
    """Return a case as a JSON object."""
    return {**case._asdict(), "offset": list(case.offset)}


class Call(NamedTuple):
    """Inputs of a graph, their description, and the names of the inputs withheld from the reference."""

    feeds: dict[str, NDArray[np.int64]]
    arguments: dict[str, JsonValue]
    omitted: tuple[str, ...] = ()


def grid_calls(described: Described, shape: tuple[int, ...]) -> Iterator[Call]:
    """Yield the calls of the grid; also every id if the vectors are the lookup, and depend on nothing else."""
    signature = described.signature
    for case in grid(signature):
        # Omitted indices compare the defaults of the reference with zeros in the graph.
        omitted = (
            *(() if case.segments else signature.indices),
            *(("attention_mask",) if case.padding == "none" else ()),
        )
        yield Call(feeds_of(signature, case), arguments_of(case), omitted)
    if signature.lookup_width is None and described.config and described.config.only_looks_up:
        yield from id_calls(described, shape)


def id_calls(described: Described, shape: tuple[int, ...]) -> Iterator[Call]:
    """Yield calls with every id, for values of `shape`."""
    ids = np.arange(described.signature.vocab_size).reshape(-1, 1)  # rows of length 1 fit within every limit
    count = min(4096, 1 + LOOKUP_CHUNK_VALUES // math.prod(shape))
    for part in np.array_split(ids, 1 + ids.size // count):
        arguments: dict[str, JsonValue] = {"from_id": int(part[0, 0]), "to_id": int(part[-1, 0])}
        yield Call({"input_ids": part, "offset": np.zeros(1, np.int64)}, arguments)


def ngram_calls(described: Described, _: tuple[int, ...]) -> Iterator[Call]:
    """Yield the calls of the grid without an offset; row ids are there for the graph that takes them."""
    assert described.config
    assert described.config.ngrams
    for case in grid(described.signature):
        if case.offset == (0,):
            feeds = feeds_of(described.signature, case)
            ids = described.config.ngrams, described.signature.vocab_size, feeds["input_ids"], feeds[CONTEXT]
            yield Call(feeds | {NGRAM_ROW_IDS: ngram_row_ids(*ids)}, arguments_of(case))


def bias_calls(described: Described, _: tuple[int, ...]) -> Iterator[Call]:
    """Yield lengths of queries and keys."""
    assert described.config
    sinusoid = isinstance(described.config.bias, RelativeSinusoidConfig)
    for query_offset, query_length, key_length in BIAS_GRID:
        lengths: dict[str, JsonValue] = {} if sinusoid else {"query_offset": query_offset}
        lengths |= {"query_length": query_length, "key_length": key_length}
        yield Call({name: np.array([length]) for name, length in lengths.items()}, lengths)
