"""The fast path: requests with only ids and an offset, which are nearly all requests, and such steps of a stream.

For one token, the general path takes several times as long as the run of the model. The fast path prepares that work
once for a model and an output, and asks only whether each request is plain. The general path answers all others, and
reports their errors.

Letters: B batch, L length, D output width.
"""

from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import CONTEXT, STORED
from preblock.service.core.errors import PreblockError
from preblock.service.core.types import Int64, TokenRequest, TokenRows
from preblock.service.engine.engine import Engine
from preblock.service.engine.plain_calls import Bounds, Call, bounds_of, is_plain
from preblock.service.engine.planning import (
    MAX_SENT_VALUES,
    BatchItem,
    Outputs,
    max_batched_values,
    resolve_outputs,
    run_batch,
)
from preblock.service.engine.scheduler import MicroBatch
from preblock.service.observability.context import RequestContext
from preblock.service.observability.record import RequestRecord
from preblock.service.runtime.chunks import CHUNK_VALUES
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.runner import Float32
from preblock.service.runtime.session import INLINE_MAX_VALUES

ALIGNED = 8
"""Alignment of integers in bytes; onnxruntime reads wrong values from unaligned memory."""


def fast_path_of(
    engine: Engine, model: TokenModel, outputs: tuple[str, ...], dtype: str, of_stream: bool = False
) -> "FastPath | None":
    """Return the fast path of a model for `outputs` in the type `dtype`; None if it supports no fast path for them.

    A stream also takes several outputs, and outputs with a history, because it has the ids before each row.
    """
    manifest, bounds = model.manifest, bounds_of(model.manifest, outputs, dtype)
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
    return FastPath(engine, model, outputs, dtype, bounds)


def has_fast_form(request: TokenRequest, manifest: Manifest) -> bool:
    """Return whether a request has nothing but ids, in rows of one length, and offsets."""
    call = None if request.pooling != "none" or not request.input_ids.length else Call.of(request, manifest)
    return call is not None and call.context is None and not call.indices and request.sequence is None


def integers(content: bytes, count: int, start: int) -> Int64:
    """Return the int64 values (count,) of little-endian bytes from `start` on."""
    values: Int64 = np.frombuffer(content, "<i8", count, start)
    return values if start % ALIGNED == 0 else values.copy()


class FastPath:
    """Computes outputs of a model, in the types of its run, for rows of one length.

    Args:
        engine: source of the scheduler, the metrics and the admission.
        model: the model.
        outputs: names of the outputs.
        dtype: "float32", or "stored" for n-gram rows; row ids are int64 with either.
        bounds: legal values of the requests.

    Attributes:
        width: values of a token in all outputs.
        forms: width and type of each output.
        max_batched_values: most values of a request in a micro-batch; 0 if every request runs alone.
        max_step_values: most values of a step of a stream.

    """

    def __init__(self, engine: Engine, model: TokenModel, outputs: tuple[str, ...], dtype: str, bounds: Bounds) -> None:
        manifest = model.manifest
        sources, self.names, self.width = resolve_outputs(outputs, manifest, dtype)
        self.sources = tuple(sources.values())
        self.forms = tuple((manifest.widths[output], manifest.dtype_of(output, dtype)) for output in outputs)
        self.model, self.metrics, self.scheduler = model, engine.metrics, engine.scheduler
        self.admission = engine.admission
        self.run = partial(run_batch, model, self.names)
        self.key = (id(model), self.names)
        self.max_batched_values = max_batched_values(model)
        self.max_step_values = self.max_batched_values or INLINE_MAX_VALUES
        self.indices = tuple(manifest.indices)
        self.bounds, self.limits = bounds, engine.limits

    def start(
        self, protocol: str, call: Call, context: RequestContext | None, started: float, *, copies: int = 0
    ) -> "FastRun | None":
        """Start a call, or return None if it is not plain, or has to wait. The caller must call `end` later.

        Args:
            protocol: protocol of the request.
            call: the call.
            context: context of the request, or of the stream.
            started: `perf_counter` at the time when the request was complete.
            copies: memory of the response, in sizes of its vectors; default 0: a large one is computed as it is sent.

        """
        size = call.ids.size * self.width
        whole = size if copies or size <= INLINE_MAX_VALUES else 0
        if not is_plain(call, self.bounds, self.limits.of_requests, whole):
            return None
        record = RequestRecord(protocol, context, started)
        if not self.admission.take_response(record, copies * size or min(size, MAX_SENT_VALUES)):
            return None  # the general path waits for memory
        try:
            self.admission.enter(record)
        except PreblockError:
            if context is not None:
                context.release()
            return None
        try:
            return FastRun(self, record, call)
        except BaseException as error:
            self.admission.end(record, error)
            if context is not None:
                context.release()
            raise


class FastRun:
    """The run of one accepted request.

    Attributes:
        batched: whether the request joins the micro-batch of this event-loop iteration; it then ends in the next.
        streamed: whether the response is computed in chunks.
        nbytes: size of the vectors in bytes.
        record: record of the request.

    """

    __slots__ = ("_batch", "_fast_path", "_item", "_number", "batched", "nbytes", "record", "streamed")

    def __init__(self, fast_path: FastPath, record: RequestRecord, call: Call) -> None:
        self._fast_path, self.record = fast_path, record
        record.select(fast_path.model.name, fast_path.model.version)
        ids = call.ids
        feeds = {"input_ids": ids, "offset": call.offset}
        for name in fast_path.indices:
            feeds[name] = np.zeros_like(ids)
        if call.context is not None:
            feeds[CONTEXT] = call.context
        self._item = BatchItem(feeds, record)
        record.rows, record.tokens = call.rows, ids.size
        size = ids.size * fast_path.width
        self.batched, self.streamed = size <= fast_path.max_batched_values, size > INLINE_MAX_VALUES
        self.nbytes = 4 * size
        record.checked = perf_counter()
        if self.batched:
            self._batch: MicroBatch[BatchItem, Outputs] = fast_path.scheduler.batch(fast_path.key, size, fast_path.run)
            self._number = self._batch.join(size, self._item)

    def leave(self) -> None:
        """Leave the micro-batch, because the caller was cancelled."""
        self._batch.leave(self._number)

    def finish(self) -> list[NDArray[Any]]:
        """Return the values of each output, (B, L, width)."""
        found = self._batch.result(self._number) if self.batched else self._fast_path.run([self._item])[0]
        self.record.ended = perf_counter()
        return [found[name] for name in self._fast_path.sources]

    def chunks(self) -> Iterator[Float32]:
        """Yield the vectors (B * L, width) of the only output in chunks."""
        fast_path, record = self._fast_path, self.record
        record.dequeued = perf_counter()
        yield from fast_path.model.run_in_chunks(self._item.feeds, fast_path.names[0], CHUNK_VALUES // fast_path.width)
        record.ran, record.batch = perf_counter(), record.rows

    def end(self, error: BaseException | None = None) -> None:
        """End the request with success, or with `error`."""
        log = self._fast_path.admission.log
        if log.max_token_ids:
            request, ids = self._item.request, self._item.feeds["input_ids"]
            log.note_ids(self.record, TokenRows.of_array(ids) if request is None else request.input_ids)
        self._fast_path.admission.end(self.record, error)
