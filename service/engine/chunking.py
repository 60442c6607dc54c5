"""Large responses, computed in chunks: they need little memory, and other requests run between the chunks.

Letters: B batch, T tokens of all rows.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.types import ChunkedTensor, OutputMemory, TokenRequest
from preblock.service.engine.admission import Admission
from preblock.service.engine.parts import place_vectors
from preblock.service.engine.planning import BatchItem, Outputs, run_batch, single_token_feeds
from preblock.service.engine.positions import pooled_tokens
from preblock.service.engine.vectors import cast, end_tokens, finish_pooled, mean
from preblock.service.observability.context import RequestRecord
from preblock.service.runtime.model import CHUNK_VALUES, TokenModel
from preblock.service.runtime.runner import Float32
from preblock.service.runtime.session import INLINE_MAX_VALUES

GPU_CHUNKS = 10
"""Chunks of a large response in one call, if the vectors stay on a GPU: a larger call takes hardly longer there. Other
calls are as large."""


def is_streamed(request: TokenRequest, manifest: Manifest, size: int) -> bool:
    """Return whether a response of `size` values is computed in chunks.

    Rotary angles are never chunked, because their graph computes all other outputs for each chunk.
    """
    large = size > INLINE_MAX_VALUES
    return large and (request.chunks != "none" or request.pooling != "none") and not manifest.rotary_of(request.outputs)


def to_token_rows(model: TokenModel, names: tuple[str, ...], item: BatchItem) -> None:
    """Turn the feeds of `item` into rows of one token, if chunks would cut rows and the graph counts real tokens."""
    if model.manifest.counts == "slots":
        return
    if item.feeds["input_ids"].shape[1] > min(_max_chunk_tokens(model, name) for name in names):
        # The graph needs the whole row to count the real tokens before a token.
        item.feeds = single_token_feeds(item, model.manifest)


def check_values(model: TokenModel, names: tuple[str, ...], item: BatchItem, request: TokenRequest) -> None:
    """Compute all values once, after `to_token_rows`, and discard them. `stream_chunks` computes them again.

    Raises:
        Invalid: the type of the response cannot hold a value.

    """
    for name in names:
        for vectors in _vectors(model, name, item):
            narrow = cast(vectors, model.manifest.dtype_of(name, request.dtype))
            if request.check is not None:
                request.check(narrow)


def stream_chunks(
    model: TokenModel, outputs: Mapping[str, str], item: BatchItem, request: TokenRequest, admission: Admission
) -> dict[str, ChunkedTensor]:
    """Return the vectors of a request in chunks. The record ends after the last chunk, or after an error.

    Args:
        model: computes the vectors.
        outputs: requested output -> output of the graph.
        item: feeds and record of the request, after `to_token_rows`.
        request: the request.
        admission: ends the record.

    """
    closer = _RecordCloser(admission, item.record, len(outputs))
    rows, tensors = request.input_ids, {}
    shape = (len(rows.values),) if rows.length is None else (len(rows.lengths), rows.length)
    for output, name in outputs.items():
        memory = _output_memory(model, name, item) if request.dtype == "float32" and not item.given else None
        chunks = _vectors(model, name, item) if memory is None else _vectors_in(memory, model, name, item)
        dtype = model.manifest.dtype_of(output, request.dtype)
        parts = _stream_output(chunks, dtype, closer)
        next(parts)  # starts the generator, so that its `except` runs even if the client leaves before the first chunk
        tensors[output] = ChunkedTensor((*shape, *model.manifest.shapes[output]), dtype, parts, memory)
    return tensors


def _output_memory(model: TokenModel, name: str, item: BatchItem) -> OutputMemory | None:
    """Return a place for memory of a client, if the model can write float32 vectors there."""
    on_gpu = model.runs_on_gpu(name)
    return OutputMemory(on_gpu) if on_gpu or model.writes_into(item.feeds, name) else None


class _RecordCloser:
    """Ends a record after the last of its outputs."""

    def __init__(self, admission: Admission, record: RequestRecord, outputs: int) -> None:
        self._admission, self._record, self._left = admission, record, outputs
        self._error: BaseException | None = None

    def close_output(self, error: BaseException | None) -> None:
        """Count one output as sent, or as failed with `error`."""
        self._left -= 1
        self._error = self._error or error
        if not self._left:
            failure, self._error = self._error, None  # its traceback holds this object, and the vectors of the request
            if failure is None:
                self._record.ran, self._record.batch = perf_counter(), self._record.rows
            self._admission.end(self._record, failure)


def _stream_output(chunks: Iterator[Float32], dtype: str, closer: _RecordCloser) -> Iterator[NDArray[np.generic]]:
    """Yield an empty array, and then the vectors of one output."""
    try:
        yield np.empty(0, np.float32)
        for vectors in chunks:
            yield cast(vectors, dtype)
            del vectors  # lets the next chunk reuse this buffer
    except BaseException as error:
        closer.close_output(error)
        raise
    closer.close_output(None)


def _vectors(model: TokenModel, name: str, item: BatchItem) -> Iterator[Float32]:
    """Yield the vectors of one output in chunks, float32."""
    chunks = model.run_in_chunks(item.feeds, name, _max_chunk_tokens(model, name))
    return _with_given(chunks, name, item) if name in item.given else chunks


def _with_given(chunks: Iterator[Float32], name: str, item: BatchItem) -> Iterator[Float32]:
    """Yield the chunks with the given vectors of the request in their places."""
    assert item.request is not None
    assert item.request.given is not None
    begin = 0
    for chunk in chunks:
        vectors = chunk.reshape(-1, chunk.shape[-1])
        del chunk
        yield place_vectors(vectors, begin, item.request.given.tokens, item.given[name])
        begin += len(vectors)
        del vectors  # lets the next chunk reuse this buffer


def _vectors_in(memory: OutputMemory, model: TokenModel, name: str, item: BatchItem) -> Iterator[Float32]:
    """Yield the vectors of one output in chunks, from `memory` if it is set by then; empty ones from a GPU."""
    if memory.target is not None:
        for _ in model.write_on_gpu(item.feeds, name, max_gpu_tokens(model, name), memory.target):
            yield np.empty(0, np.float32)
        return
    if memory.vectors is None or memory.lost is None:
        yield from _vectors(model, name, item)
        return
    try:
        yield from model.run_into_chunks(item.feeds, _max_chunk_tokens(model, name), memory.vectors)
    except BufferError:
        raise memory.lost() from None


def _max_chunk_tokens(model: TokenModel, name: str) -> int:
    """Return the most tokens of a chunk of one output."""
    return max(1, CHUNK_VALUES // model.widths[name])


def max_gpu_tokens(model: TokenModel, name: str) -> int:
    """Return the most tokens of a chunk that stays on a GPU; bits that depend on the shape need the same chunks."""
    return _max_chunk_tokens(model, name) * (GPU_CHUNKS if model.exact_rows else 1)


def compute_buffered(model: TokenModel, names: tuple[str, ...], item: BatchItem) -> Outputs:
    """Return outputs in full, (B, L, width). Large outputs are computed in chunks and copied together.

    onnxruntime keeps the memory of its largest run. The memory of a copy is freed with the response.
    """
    size = item.feeds["input_ids"].size * max(model.widths[name] for name in names)
    if size <= INLINE_MAX_VALUES or model.manifest.rotary_of(names):
        return run_batch(model, names, [item])[0]
    return _compute(model, names, item, partial(_buffer_output, model, item))


def compute_pooled(
    model: TokenModel, outputs: Mapping[str, str], item: BatchItem, request: TokenRequest
) -> dict[str, NDArray[np.generic]]:
    """Return the pooled vectors of each output, (B, width). Only one chunk of token vectors is in memory at a time."""
    names = tuple(dict.fromkeys(outputs.values()))
    found = _compute(model, names, item, partial(_pool_output, model, item, request))
    return {
        output: cast(finish_pooled(found[name], request, model.manifest), request.dtype)
        for output, name in outputs.items()
    }


def _compute(model: TokenModel, names: tuple[str, ...], item: BatchItem, compute: Callable[[str], Float32]) -> Outputs:
    """Return each output from `compute`, and record the time as one run."""
    item.record.dequeued = perf_counter()
    to_token_rows(model, names, item)
    found = {name: compute(name) for name in names}
    item.record.ran, item.record.batch = perf_counter(), item.record.rows
    return found


def _buffer_output(model: TokenModel, item: BatchItem, name: str) -> Float32:
    vectors: Float32 | None = None
    rest = np.empty(0, np.float32)
    for chunk in _vectors(model, name, item):
        if vectors is None:
            vectors = np.empty((*item.feeds["input_ids"].shape, model.widths[name]), chunk.dtype)
            rest = vectors.reshape(-1)
        rest[: chunk.size] = chunk.reshape(-1)
        rest = rest[chunk.size :]
        del chunk  # lets the next chunk reuse this buffer
    assert vectors is not None
    return vectors


def _pool_output(model: TokenModel, item: BatchItem, request: TokenRequest, name: str) -> Float32:
    rows, real, width = request.input_ids, pooled_tokens(request, model.manifest), model.manifest.widths[name]
    if request.pooling == "mean":
        return mean((chunk.reshape(-1, width) for chunk in _vectors(model, name, item)), rows, real, width)
    tokens = end_tokens(rows, real, request.pooling)
    feeds = {key: values[tokens] for key, values in single_token_feeds(item, model.manifest).items()}
    return _buffer_output(model, BatchItem(feeds, item.record), name).reshape(-1, width)
