"""The fast path: plain requests, which are nearly all requests, and such steps of a stream.

For one token, the general path takes several times as long as the run of the model. The fast path prepares that work
once for a model and an output, and asks only whether each request is plain. The general path answers all others, and
reports their errors.

Letters: B batch, L length, D output width.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.names import CONTEXT, STORED
from preblock.service.core.errors import PreblockError
from preblock.service.core.types import ChunkedTensor, Int64, TextRequest, TokenRequest
from preblock.service.engine.engine import Engine, finish_outputs, tokenize, tokenizer_cost
from preblock.service.engine.plain_calls import Bounds, Call, bounds_of, is_plain
from preblock.service.engine.planning import (
    MAX_SENT_VALUES,
    NO_VECTORS,
    BatchItem,
    Outputs,
    max_batched_values,
    plan,
    resolve_outputs,
    run_batch,
)
from preblock.service.engine.scheduler import MicroBatch
from preblock.service.engine.vectors import average_in_place, table_of_means
from preblock.service.observability.context import CURRENT_REQUEST, RequestRecord
from preblock.service.runtime.means import LookupTable
from preblock.service.runtime.model import CHUNK_VALUES, TokenModel
from preblock.service.runtime.runner import Float32
from preblock.service.runtime.session import INLINE_MAX_VALUES

LITTLE_ENDIAN = np.dtype("<i8")
ALIGNED = 8
"""Alignment of integers in bytes; onnxruntime reads wrong values from unaligned memory."""


def fast_path_of(
    engine: Engine,
    model: TokenModel,
    outputs: tuple[str, ...],
    dtype: str,
    protocol: str,
    *,
    pooling: str = "none",
    of_stream: bool = False,
    copies: int = 0,
) -> "FastPath | None":
    """Return the fast path of a model for `outputs` in the type `dtype`; None if it supports no fast path for them.

    A stream also takes several outputs, and outputs with a history, because it has the ids before each row.
    """
    manifest, bounds = model.manifest, bounds_of(model.manifest, outputs, dtype, pooling)
    if (
        bounds is None
        or dtype not in ("float32", STORED)
        or (len(outputs) != 1 and not of_stream)
        or manifest.counts != "slots"
        or manifest.needed
        or manifest.needs_mask
        or (bounds.needs_context and not of_stream)
    ):
        return None
    most: float = math.inf if pooling == "none" else INLINE_MAX_VALUES
    if of_stream:
        most = max_batched_values(model) or INLINE_MAX_VALUES
    return FastPath(engine, model, outputs, dtype, protocol, bounds=bounds, copies=copies, most=most)


def integers(content: bytes, shape: tuple[int, ...], start: int) -> Int64:
    """Return int64 values of little-endian bytes from `start` on."""
    values: Int64 = np.ndarray(shape, LITTLE_ENDIAN, content, start)  # half the time of `frombuffer` and `reshape`
    return values if start % ALIGNED == 0 else values.copy()


def tokenize_short(
    engine: Engine, model: TokenModel, texts: Sequence[str], request: TextRequest, size: int = 0
) -> Call | None:
    """Return the call of texts, with the options of a request; None for long texts, under load, or after a failure.

    `size` is the number of bytes of the body.
    """
    if not engine.limits.admits() or not engine.scheduler.is_inline(tokenizer_cost(model, texts)):
        return None
    try:
        return Call.of(tokenize(model, texts, request, engine.max_tokens), model.manifest, size)
    except Exception:
        return None  # a tokenizer may raise any exception; the general path reports it


class FastPath:
    """Computes outputs of a model, in the types of its run, for rows of one length, or pooled.

    Args:
        engine: source of the scheduler, the metrics and the admission.
        model: the model.
        outputs: names of the outputs.
        dtype: "float32", or "stored" for n-gram rows; row ids are int64 with either.
        protocol: of the requests.
        bounds: legal values of the requests.
        copies: memory of a response, in sizes of its vectors; 0 if a large one is computed as it is sent.
        most: most values of the tokens of a request.

    Attributes:
        width: values of a token in all outputs.
        names: outputs of the run.
        sources: output of the run for each output.
        key: of its micro-batches.

    """

    def __init__(
        self,
        engine: Engine,
        model: TokenModel,
        outputs: tuple[str, ...],
        dtype: str,
        protocol: str,
        *,
        bounds: Bounds,
        copies: int,
        most: float,
    ) -> None:
        self.sources, self.names, self.width = resolve_outputs(outputs, model.manifest, dtype)
        self.engine, self.model, self.protocol = engine, model, protocol
        self.bounds, self._copies, self._most = bounds, copies, most
        self._max_batched_values = max_batched_values(model)
        self.run, self.key = partial(run_batch, model, self.names), (id(model), self.names)

    def start(self, call: Call, started: float) -> "FastRun | None":
        """Start a call, or return None if it is not plain, or has to wait. The caller must call `end` later.

        `started` is `perf_counter` at the time when the request was complete.
        """
        size, engine = call.ids.size * self.width, self.engine
        whole = size if self._copies or size <= INLINE_MAX_VALUES else 0
        if size > self._most or not is_plain(call, self.bounds, engine.settings.requests, whole):
            return None
        context = CURRENT_REQUEST.get()
        record = RequestRecord(self.protocol, context, started)
        values = size if call.request is None else call.rows * self.width
        admission = engine.admission
        if not admission.take_response(record, self._copies * values or min(values, MAX_SENT_VALUES)):
            return None  # the general path waits for memory
        try:
            admission.enter(record)
        except PreblockError:
            if context is not None:
                context.release()
            return None
        try:
            return FastRun(self, record, call, 0 if call.request is not None else self._max_batched_values)
        except BaseException as error:
            admission.end(record, error)
            if context is not None:
                context.release()
            raise


class FastRun:
    """The run of one started call.

    Args:
        path: of the call.
        record: of the request.
        call: the call.
        max_batched_values: most values in a micro-batch; 0 if the call runs alone.

    Attributes:
        batched: whether the request joins the micro-batch of this event-loop iteration; it then ends in the next.
        streamed: whether the response is computed in chunks.

    """

    __slots__ = ("_batch", "_item", "_number", "_path", "_pooled", "_table", "batched", "record", "streamed")

    def __init__(self, path: FastPath, record: RequestRecord, call: Call, max_batched_values: int) -> None:
        self._path, self.record = path, record
        record.model, record.version, record.selected = path.model.name, path.model.version, record.started
        record.rows, record.tokens = call.rows, call.ids.size
        record.ids = call.ids if call.request is None else call.request.input_ids
        feeds = {"input_ids": call.ids, "offset": call.offset}
        self._table: LookupTable | None = None
        self._pooled = call.pooled
        if call.request is not None:
            self._table = table_of_means(path.model, path.names, call.request)
            if self._table is None:
                feeds = plan(call.request, path.model.manifest)[0]
        elif path.bounds.indices or call.context is not None:
            feeds |= _further_feeds(path, call)
        self._item = BatchItem(feeds, record, call.request, NO_VECTORS)
        size = call.ids.size * path.width
        self.batched, self.streamed = size <= max_batched_values, size > INLINE_MAX_VALUES
        record.checked = perf_counter()
        if self.batched:
            self._batch: MicroBatch[BatchItem, Outputs] = path.engine.scheduler.batch(path.key, size, path.run)
            self._number = self._batch.join(size, self._item)

    def leave(self) -> None:
        """Leave the micro-batch, because the caller was cancelled."""
        self._batch.leave(self._number)

    def result(self) -> list[NDArray[Any]]:
        """Return the values of each output of a run without chunks: (B, L, width), or pooled (B, D)."""
        path, item = self._path, self._item
        if item.request is not None:
            tensors = self._pool(item.request)
        else:
            found = self._batch.result(self._number) if self.batched else path.run([item])[0]
            tensors = [found[name] for name in path.sources.values()]
        self.record.ended = perf_counter()
        return tensors

    def _pool(self, request: TokenRequest) -> list[NDArray[Any]]:
        """Return one vector of the output for each row."""
        path, item, manifest = self._path, self._item, self._path.model.manifest
        if self._table is not None:
            return [average_in_place(self._table, request, manifest, self._pooled, self.record)]
        return [*finish_outputs(request, item, manifest, path.sources, path.run([item])[0]).values()]

    def chunks(self) -> ChunkedTensor:
        """Return the values of the only output, (B * L * width,), computed while they are read."""
        path = self._path
        return ChunkedTensor((self.record.tokens * path.width,), "float32", self._chunks())

    def _chunks(self) -> Iterator[Float32]:
        path, record = self._path, self.record
        record.dequeued = perf_counter()
        yield from path.model.run_in_chunks(self._item.feeds, path.names[0], CHUNK_VALUES // path.width)
        record.ran, record.batch = perf_counter(), record.rows

    def end(self, error: BaseException | None = None) -> None:
        """End the request with success, or with `error`."""
        self._path.engine.admission.end(self.record, error)

    def count_bytes(self, received: int, sent: int, read: float, send: float = 0.0) -> None:
        """Count the bytes of the request and of its response, and the seconds of reading and sending them."""
        self._path.engine.metrics.count_bytes(self._path.protocol, received, sent, read, send)


def _further_feeds(path: FastPath, call: Call) -> dict[str, Int64]:
    """Return the inputs of the model beside ids and offset."""
    feeds = {name: np.zeros_like(call.ids) for name in path.bounds.indices}
    return feeds if call.context is None else feeds | {CONTEXT: call.context}
