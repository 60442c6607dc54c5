"""Sequences: running offsets of rows across requests, under an id chosen by the client.

Letters: R rows of a sequence.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from preblock.service.core.decode_ops import RunningRows, check_each
from preblock.service.core.errors import Conflict, Invalid, TooLarge, Unavailable, shorten
from preblock.service.core.types import AnyRequest, PartsRequest, Result, TokenRequest, TokenRows, per_row
from preblock.service.engine.decode_stream import run_step
from preblock.service.engine.engine import Engine
from preblock.service.engine.plain_calls import ZERO
from preblock.service.observability.context import RequestRecord
from preblock.service.runtime.model import EncoderStem, TokenModel

NO_ROWS = RunningRows(np.empty(0, np.int64))
ID = "parameters.sequence_id"
CHECK_SECONDS = 1.0
"""Longest time between two searches for idle sequences."""


class SequenceKey(NamedTuple):
    """Key of a sequence: the id, and the artifact of its requests."""

    model: str
    version: int
    identity: str
    id: int | str


@dataclass(frozen=True)
class _Slot:
    """The rows of an idle sequence, and the time of its last request, in seconds of the event loop."""

    running: RunningRows
    since: float


class Sequences:
    """All sequences of this process.

    Args:
        engine: computes the requests, and holds the settings.

    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings = engine, engine.settings
        self.rows = 0
        # For requests outside of streams. With several workers, another worker may get the next request.
        self.shared_store = SequenceStore(self, None, engine.settings.current.workers)

    @contextmanager
    def stream(self) -> Iterator["SequenceStore"]:
        """Create a store for the sequences of one stream, and clear it after the block."""
        store = SequenceStore(self, self.settings.current.max_stream_sequence_rows)
        try:
            yield store
        finally:
            store.clear()


class SequenceStore:
    """Sequences of one stream, or of all requests outside of streams.

    Args:
        sequences: all sequences of the process.
        max_rows: most rows of all sequences in this store; None for no limit.
        workers: number of processes behind the address; with several, sequences are refused.

    """

    def __init__(self, sequences: Sequences, max_rows: int | None, workers: int = 1) -> None:
        self._all, self._max_rows, self._workers = sequences, max_rows, workers
        self._rows = 0
        # Ordered by the last request, so that the first sequence times out first.
        self._slots: dict[SequenceKey, _Slot] = {}
        self._busy: set[SequenceKey] = set()
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def answer(
        self, model: TokenModel | EncoderStem, request: AnyRequest, record: RequestRecord
    ) -> AsyncIterator[Result]:
        """Yield the result of a request, at the offsets and contexts of its sequence if it names one.

        They advance at the end of the block. If the block raises, the sequence is unchanged.

        Raises:
            Invalid: no such sequence runs, or a value is not allowed.
            Conflict: the stated offset differs, or another request of the sequence is in flight.
            TooLarge: the request has more rows than all sequences may have.
            Unavailable: other sequences hold too many rows.

        """
        reference = request.sequence if isinstance(request, TokenRequest | PartsRequest) else None
        if not isinstance(model, TokenModel) or reference is None:
            yield await self._all.engine.answer(model, request, record)
            return
        if isinstance(request, PartsRequest):
            request = await self._all.engine.to_tokens(model, request)
        assert isinstance(request, TokenRequest)
        key = SequenceKey(model.name, model.version, model.identity, reference.id)
        running = kept = self._find(key, reference.start)
        before, stated = len(running.offset), request.offset
        if reference.start or not before:
            rows = len(request.input_ids.lengths)
            running = RunningRows(per_row("offset", ZERO if stated is None else stated, rows))
            check_each("offset", running.offset, np.full(rows, model.manifest.limit))
            stated = None
        elif request.context is not None and running.context is not None:
            raise Invalid("context", "a value", "nothing, since the sequence keeps it")
        elif request.given is not None and running.context is not None:
            raise Invalid("vectors", "a value", "token ids, since the sequence keeps the last ids of each row")
        held = max(before, len(running.offset))
        self._hold(held - before)
        self._slots.pop(key, None)
        self._busy.add(key)
        after = kept
        context = request.context if running.context is None else TokenRows.of_array(running.context)
        step = replace(request, offset=None, context=context)
        try:
            answer = await run_step(self._all.engine, model, step, record, running.offset, stated)
            yield answer
            after = NO_ROWS if reference.end else RunningRows(answer.next_offset, answer.next_context)
        finally:
            self._busy.remove(key)
            self._hold(len(after.offset) - held)
            self._all.engine.metrics.sequences(bool(len(after.offset)) - bool(before))
            if len(after.offset):
                self._keep(key, after)

    def running(self) -> dict[SequenceKey, RunningRows]:
        """Return the rows of every idle sequence."""
        return {key: slot.running for key, slot in self._slots.items()}

    def clear(self) -> None:
        """Release every idle sequence."""
        for key in tuple(self._slots):
            self._release(key)
        if self._timer is not None:
            self._timer.cancel()

    def _find(self, key: SequenceKey, start: bool) -> RunningRows:
        """Return the rows of a sequence; none for a new sequence."""
        name = repr(key.id)
        if self._workers > 1:
            message = (
                f"{ID} needs a single worker: any of the {self._workers} workers here may get the next request; "
                "send offset instead"
            )
            raise Invalid(ID, name, "none", message=message)
        if key in self._busy:
            message = f"{ID} {shorten(name)} has a request in progress; send one at a time"
            raise Conflict(ID, name, "one request of a sequence at a time", message=message)
        slot = self._slots.get(key)
        if slot is None and not start:
            model = f"{key.model} version {key.version}"
            message = f"{ID} {shorten(name)} does not run on {model}; its first request has sequence_start"
            raise Invalid(ID, name, "a running sequence", message=message)
        return NO_ROWS if slot is None else slot.running

    def _hold(self, rows: int) -> None:
        """Add `rows` to the counts of rows, within their limits; negative `rows` release some."""
        limit = self._all.settings.current.max_sequence_rows
        for running, most in ((self._rows, self._max_rows), (self._all.rows, limit)):
            if most is not None and 0 < rows > most - running:
                kind = TooLarge if rows > most else Unavailable
                message = (
                    f"input_ids: {rows} rows beside {running} that run exceed the limit of {most} rows of sequences"
                )
                raise kind("input_ids", f"{rows} rows beside {running}", f"at most {most}", message=message)
        self._rows += rows
        self._all.rows += rows

    def _keep(self, key: SequenceKey, running: RunningRows) -> None:
        self._slots[key] = _Slot(running, asyncio.get_running_loop().time())
        if self._timer is None:
            self._release_idle()

    def _release_idle(self) -> None:
        """Release timed-out sequences, and set the timer for the next search: the timeout may change before."""
        loop, self._timer = asyncio.get_running_loop(), None
        for key, slot in tuple(self._slots.items()):
            end = slot.since + self._all.settings.current.sequence_idle_timeout_seconds
            if end > loop.time():
                self._timer = loop.call_at(min(end, loop.time() + CHECK_SECONDS), self._release_idle)
                return
            self._release(key)

    def _release(self, key: SequenceKey) -> None:
        self._hold(-len(self._slots.pop(key).running.offset))
        self._all.engine.metrics.sequences(-1)
