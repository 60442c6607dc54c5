"""Reads the rows of frequent tokens before a model is ready, so that its first requests do not wait for a disk.

Letters: R rows, L length.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.lib.format import open_memmap

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import CONTEXT, NGRAMS
from preblock.service.core.errors import Invalid
from preblock.service.core.types import Int64
from preblock.service.runtime.ngram_rows import NgramRows
from preblock.service.runtime.runner import Feeds
from preblock.service.runtime.table_memory import TableMemory

LOG = logging.getLogger(__name__)
CHUNK_TOKENS = 1024
THREADS = 16
"""Reads that wait for the disk at the same time."""
FIELD = "table_warm_up_file"


def read_token_ids(file: Path | None) -> Int64 | None:
    """Return the token ids in a `.npy` file, int64 (R, L); None without a file.

    Raises:
        Invalid: the file cannot be read, or contains something else.

    """
    if file is None:
        return None
    got, expected = str(file), "a .npy file of token ids, int64 [rows, length]"
    try:
        ids: Int64 = np.array(open_memmap(file, mode="r"))  # checks the size before it allocates memory
    except Exception as error:  # NumPy's parser of headers raises many kinds of errors
        raise Invalid(FIELD, got, expected, message=f"{FIELD} {file} cannot be read: {error}") from error
    if ids.dtype != np.int64 or ids.ndim != 2 or not ids.size:
        message = f"{FIELD} {file} has {ids.dtype} {list(ids.shape)}, expected {expected}"
        raise Invalid(FIELD, got, expected, message=message)
    return ids


def warm_up(name: str, rows: NgramRows, manifest: Manifest, memory: TableMemory) -> None:
    """Read the rows of `memory.warm_up_ids`, each row of ids from the start of a sequence; log a line.

    Ids of another vocabulary read nothing: they may be meant for another model.
    """
    ids = memory.warm_up_ids
    if ids is None:
        return
    if ids.min() < 0 or ids.max() >= manifest.vocab_size:
        text = "%s: its table rows are not read early: %s has ids from %d to %d, expected 0 to %d"
        LOG.warning(text, name, FIELD, ids.min(), ids.max(), manifest.vocab_size - 1)
        return

    def read(feeds: Feeds) -> None:
        rows.run(feeds, [NGRAMS])

    begin = perf_counter()
    # Several threads may exceed a budget: each may have just reserved its rows.
    with ThreadPoolExecutor(THREADS if memory.max_rows is None else 1) as threads:
        chunks = _split(ids, manifest)
        while some := list(islice(chunks, 8 * THREADS)):  # all chunks at once would copy all ids
            list(threads.map(read, some))
    LOG.info("%s: read the table rows of %d tokens in %.1f s", name, ids.size, perf_counter() - begin)


def _split(ids: Int64, manifest: Manifest) -> Iterator[Feeds]:
    """Yield the inputs of chunks of `ids`: a part of one row, or several rows."""
    assert manifest.history is not None
    history, length = manifest.history.tokens, min(ids.shape[1], CHUNK_TOKENS)
    count = CHUNK_TOKENS // length
    for row in range(0, len(ids), count):
        # The context of the first tokens is the one of a new sequence.
        some = np.pad(ids[row : row + count], ((0, 0), (history, 0)), constant_values=manifest.history.reset_id)
        for begin in range(0, ids.shape[1], length):
            chunk = some[:, begin : begin + history + length]
            yield {
                "input_ids": np.ascontiguousarray(chunk[:, history:]),
                CONTEXT: np.ascontiguousarray(chunk[:, :history]),
            }
