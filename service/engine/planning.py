"""Plans runs of a model: the feeds of one request, and the common run of a micro-batch.

Letters: B batch, L length, T tokens of all rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from types import MappingProxyType

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import CONTEXT, EMBEDDINGS, NGRAMS, STORED, STORED_NGRAMS, TOKEN_EMBEDDINGS
from preblock.service.core.types import Int64, TokenRequest
from preblock.service.engine.history import context_of, token_contexts
from preblock.service.engine.plain_calls import ZERO
from preblock.service.engine.positions import count_real, graph_counts, next_positions, position_index
from preblock.service.observability.context import RequestRecord
from preblock.service.runtime.model import CHUNK_VALUES, TokenModel
from preblock.service.runtime.runner import Float32
from preblock.service.runtime.session import INLINE_MAX_VALUES

MAX_BATCHED_VALUES = 2**14
"""Most values of a request in a micro-batch on the CPU; a larger request gains nothing from batching."""
MAX_SENT_VALUES = 2 * CHUNK_VALUES
"""Most values in memory of a response that is computed while it is sent: a chunk as vectors, and as text."""

NO_VECTORS: Mapping[str, Float32] = MappingProxyType({})
"""No given vectors of an item."""
Outputs = dict[str, Float32]
"""Vectors by the name of their output."""


# Not frozen: every request makes one, and a frozen one takes three times as long.
@dataclass(eq=False, slots=True)
class BatchItem:
    """One request in a run.

    Args:
        feeds: inputs of the model.
        record: of the request.
        request: None on the fast path, where all tokens are real and have consecutive positions.
        given: vectors (N, width) in place of those of the given tokens of the request, by output of the graph.

    """

    feeds: dict[str, Int64]
    record: RequestRecord
    request: TokenRequest | None = None
    given: Mapping[str, Float32] = field(default_factory=lambda: NO_VECTORS)


def max_batched_values(model: TokenModel) -> int:
    """Return the most values of a request in a micro-batch of this model; 0 if it runs every request alone.

    The limit is higher on a GPU, because a larger call takes hardly longer there.
    """
    if not model.exact_rows:
        return 0
    return INLINE_MAX_VALUES if model.batches_freely else MAX_BATCHED_VALUES


def plan(request: TokenRequest, manifest: Manifest) -> tuple[dict[str, Int64], Int64]:
    """Return the feeds of a validated request, and the offset after it of each row, int64 (B,)."""
    rows = request.input_ids
    offset = ZERO if request.offset is None else request.offset
    next_offset: Int64 = offset + count_real(request, manifest)
    shape, positions = (len(rows.values), 1), offset
    if graph_counts(request, manifest):
        shape = (len(rows.lengths), len(rows.values) // len(rows.lengths))
    elif request.position_ids is None:
        positions = position_index(request, manifest, offset)
    else:
        positions = request.position_ids.values
        if not request.further_positions:
            next_offset = next_positions(request, manifest)
    feeds = {"input_ids": rows.values}
    for name in manifest.indices:
        feeds[name] = request.indices[name].values if name in request.indices else np.zeros_like(rows.values)
    if manifest.needs_mask:
        mask = request.attention_mask
        feeds["attention_mask"] = np.ones_like(rows.values) if mask is None else mask.values
    feeds = {name: values.reshape(shape) for name, values in feeds.items()} | {"offset": positions}
    if manifest.needs_history(request.outputs):
        contexts = context_of if graph_counts(request, manifest) else token_contexts
        feeds[CONTEXT] = contexts(request, manifest)
    if request.further_positions and manifest.rotary_of(request.outputs):  # the tokens once for each axis
        axes = [positions, *(rows.values for rows in request.further_positions)]
        feeds = {name: np.concatenate([values] * len(axes)) for name, values in feeds.items()}
        feeds["offset"] = np.concatenate(axes)
    return feeds, next_offset


def join_axes(vectors: Float32, output: str, manifest: Manifest) -> Float32:
    """Return the vectors (T, 1, width) of tokens from a run for each axis of positions, (3 * T, 1, width).

    Each column of a rotary output is of its own axis; other outputs do not depend on the further axes.
    """
    width = vectors.shape[-1]
    each = vectors.reshape(3, -1, 1, width)
    axes = next((rotary.axes for rotary in manifest.rotary_of((output,))), ())
    joined: Float32 = each[0]
    if axes:
        columns = np.resize(np.array(axes), width)  # the pairs of a full or fused form repeat
        joined = np.ascontiguousarray(np.moveaxis(each[columns, :, :, np.arange(width)], 0, -1))
    return joined


@lru_cache
def resolve_outputs(
    outputs: tuple[str, ...], manifest: Manifest, dtype: str
) -> tuple[Mapping[str, str], tuple[str, ...], int]:
    """Return the output of a run for each requested output, the distinct outputs of the run, and the sum of widths."""
    # If the token embeddings enter block 0 unchanged, the graph has no separate output for them.
    same = manifest.token_embeddings is not None and manifest.token_embeddings.output == EMBEDDINGS
    sources = {name: EMBEDDINGS if same and name == TOKEN_EMBEDDINGS else name for name in outputs}
    if dtype == STORED and NGRAMS in sources:
        sources[NGRAMS] = STORED_NGRAMS
    return sources, tuple(dict.fromkeys(sources.values())), sum(manifest.widths[name] for name in outputs)


def run_batch(model: TokenModel, outputs: tuple[str, ...], items: list[BatchItem]) -> list[Outputs]:
    """Return the outputs of each item. Several items run together, as rows of one token."""
    dequeued = perf_counter()
    if len(items) == 1:
        record = items[0].record
        found = model.run(items[0].feeds, outputs)
        record.dequeued, record.ran, record.batch = dequeued, perf_counter(), record.rows
        return [found]
    rows = [single_token_feeds(item, model.manifest) for item in items]
    found = model.run({name: np.concatenate([row[name] for row in rows]) for name in rows[0]}, outputs)
    ran, begin, results = perf_counter(), 0, []
    for item in items:
        shape = item.feeds["input_ids"].shape
        end = begin + math.prod(shape)
        results.append({name: vectors[begin:end].reshape(*shape, -1) for name, vectors in found.items()})
        begin = end
        item.record.dequeued, item.record.ran, item.record.batch = dequeued, ran, 0
    items[0].record.batch = sum(item.record.rows for item in items)
    return results


def single_token_feeds(item: BatchItem, manifest: Manifest) -> dict[str, Int64]:
    """Return the feeds of an item as rows of one token, with the position as offset. Any subset of the rows can run."""
    feeds, offset = item.feeds, item.feeds["offset"]
    batch, length = feeds["input_ids"].shape
    if len(offset) < batch:
        offset = np.repeat(offset, batch)
        feeds = feeds | {"offset": offset}
    if length == 1:
        return feeds
    if item.request is not None and manifest.counts != "slots":
        positions = position_index(item.request, manifest, offset)
    else:
        positions = (offset.reshape(-1, 1) + np.arange(length)).reshape(-1)
    single = {name: values.reshape(-1, 1) for name, values in feeds.items() if name not in ("offset", CONTEXT)}
    if CONTEXT in feeds:
        history = feeds[CONTEXT].shape[1]
        ids = np.concatenate((feeds[CONTEXT], feeds["input_ids"]), axis=1)
        single[CONTEXT] = sliding_window_view(ids, history, axis=1)[:, :-1].reshape(-1, history)
    return single | {"offset": positions}
