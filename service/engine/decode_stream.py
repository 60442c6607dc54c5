"""State of a decode stream: the running offsets of its rows. The connection owns the state.

Letters: R rows of the stream, T tokens of a step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from preblock.service.core import decode_ops
from preblock.service.core.errors import Conflict, Invalid, PreblockError
from preblock.service.core.types import EmbedResult, Int64, PartsRequest, Tensor, TokenRequest, TokenRows, per_row
from preblock.service.engine.engine import Engine
from preblock.service.engine.history import RowHistories
from preblock.service.engine.plain_calls import check_size
from preblock.service.engine.positions import count_real, next_positions
from preblock.service.engine.validation import (
    check_all_lengths,
    check_choice,
    check_context,
    select_rows,
    to_position_ids,
)
from preblock.service.engine.vectors import check_dtype
from preblock.service.observability.context import RequestRecord
from preblock.service.runtime.model import TokenModel


@dataclass(frozen=True)
class _LastMessage:
    """The last numbered message, the offsets before and after it, and the histories before it.

    A repeated step is computed again from them.
    """

    number: int
    digest: bytes
    before: Int64
    after: Int64
    histories: RowHistories | None


class DecodeState:
    """Offsets and options of a decode stream.

    Args:
        engine: computes the steps.
        model: model of the whole stream.
        options: start offsets, outputs and type.

    Raises:
        Invalid: an offset, output or type is not allowed.
        TooLarge: the stream has more rows than a step may have tokens.

    """

    def __init__(self, engine: Engine, model: TokenModel, options: decode_ops.DecodeOptions) -> None:
        decode_ops.check_count("rows", options.rows, engine.max_tokens)
        check_size(engine.settings.requests, "rows", rows=options.rows)
        self.offset = per_row("offset", options.offset, options.rows)
        decode_ops.check_each("offset", self.offset, np.full(options.rows, model.manifest.limit))
        for output in options.outputs:
            check_choice("output", output, model.manifest.widths)
        check_dtype(options.dtype, options.outputs, model.manifest)
        history, needed = model.manifest.history, model.manifest.needs_history(options.outputs)
        check_context(options.context, self.offset, model.manifest, needed)
        self.histories = RowHistories.start(history, options.rows, options.context) if history and needed else None
        self.model = model
        self.options = options
        self._engine = engine
        self._last: _LastMessage | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Restore the state if the block raises a PreblockError: a step without a response does not count."""
        before = self.offset, self.histories, self._last
        try:
            yield
        except PreblockError:
            self.offset, self.histories, self._last = before
            raise

    @property
    def history(self) -> int:
        """Number of ids before a token in the context of a row; 0 if no output depends on them."""
        return 0 if self.histories is None else self.histories.history.tokens

    @property
    def running(self) -> decode_ops.RunningRows:
        """The state of all rows."""
        return decode_ops.RunningRows(self.offset, None if self.histories is None else self.histories.context)

    async def do(self, message: decode_ops.DecodeMessage, record: RequestRecord) -> EmbedResult | None:
        """Execute a message, and return the vectors of a step, or None for another operation. `record` gets its name.

        A client may repeat the last numbered message until another message changes an offset. The repeated message has
        the same response, and changes nothing.

        Raises:
            ClientFault: the message is not allowed; the state is unchanged.

        """
        operation = message.operation
        record.operation = operation.name if isinstance(operation, decode_ops.RowsOp) else decode_ops.STEP
        repeated = self._repeats(message)
        if isinstance(operation, PartsRequest):
            operation = await self.assemble(operation)
        before, histories = self.offset, self.histories
        if repeated is not None:
            before, histories = repeated.before, repeated.histories
        answer: EmbedResult | None = None
        if isinstance(operation, TokenRequest):
            request = to_position_ids(operation, self.model.manifest)
            stated, request.offset = request.offset, None
            request.outputs, request.dtype = self.options.outputs, self.options.dtype
            if histories is not None:
                request.context = TokenRows.of_array(histories.context)
                request.new_rows = None if request.position_ids is None else histories.new_rows(before)
            answer = await run_step(self._engine, self.model, request, record, before, stated)
            answer.tensors = _flatten(answer, self.model)  # a frame has one width for each output
            after = answer.next_offset
            histories = None if histories is None else histories.fed(request)
        elif isinstance(operation, decode_ops.CloseOp):
            after = before
        else:
            after = decode_ops.offsets_after(operation, before, self.model.manifest.limit, self._engine.max_tokens)
            check_size(self._engine.settings.requests, "rows", rows=len(after))
            if isinstance(operation, decode_ops.AppendOp):
                manifest, needed = self.model.manifest, histories is not None
                check_context(operation.context, operation.values, manifest, needed)
            histories = None if histories is None else histories.moved(operation, before, after)
        if repeated is None:
            self.advance(after, message.number, message.digest, histories)
        return answer

    async def assemble(self, parts: PartsRequest) -> TokenRequest:
        """Return rows made of parts as a step of token ids and given vectors.

        Raises:
            ClientFault: the parts are not allowed, or the stream has another number of rows.
            Unavailable: the work queue is full.

        """
        _check_row_count("parts", len(parts.rows), len(self.offset))
        parts.special_tokens_in_text = self.options.special_tokens_in_text
        parts.outputs, parts.dtype = self.options.outputs, self.options.dtype
        return await self._engine.to_tokens(self.model, parts)

    def advance(self, after: Int64, number: int, digest: bytes, histories: RowHistories | None) -> None:
        """Set the offsets and histories after a new message, and remember the message if it has a number."""
        if number:
            self._last = _LastMessage(number, digest, self.offset, after, self.histories)
        self.offset, self.histories = after, histories

    def is_new(self, number: int) -> bool:
        """Return whether a number is higher than all earlier numbers, or 0, for no number."""
        return not number or self._last is None or number > self._last.number

    def _repeats(self, message: decode_ops.DecodeMessage) -> _LastMessage | None:
        """Return the last message if this message repeats it.

        Raises:
            Conflict: the number is not new, and the message is no repetition.

        """
        last = self._last
        if not message.number or last is None or message.number > last.number:
            return None
        # `is`, not `==`: after a message without a number, a repetition is refused even if the offsets are equal.
        if message.number == last.number and message.digest == last.digest and last.after is self.offset:
            return last
        again = f", or {last.number} again with the same content" if last.after is self.offset else ""
        raise Conflict("step", message.number, f"more than {last.number}{again}")


async def run_step(
    engine: Engine, model: TokenModel, request: TokenRequest, record: RequestRecord, offset: Int64, stated: Int64 | None
) -> EmbedResult:
    """Return the vectors of the next tokens of rows at `offset`, int64 (R,), and the offsets after the tokens.

    After `position_ids` of one or of three axes, a row continues at the position after the largest of its real tokens.
    Some rows may be empty, but not all. `request` has no offset yet. `stated` is the offset expected by the client.

    Raises:
        Conflict: `stated` differs from `offset`.
        ClientFault: the step is not allowed.
        Unavailable: the work queue is full.

    """
    ids = request.input_ids
    _check_row_count("input_ids", len(ids.lengths), len(offset))
    if stated is not None:
        decode_ops.check_stated(stated, offset)
    request = to_position_ids(request, model.manifest)
    if request.position_ids is None:
        request.offset = offset
    fed, context = np.flatnonzero(ids.lengths), request.context
    some = 0 < len(fed) < len(offset)
    if some:  # errors name the rows by their numbers in the stream
        check_all_lengths(request)
        request = select_rows(request, fed)
    answer = await engine.embed(model, request, record)
    if request.position_ids is not None:  # a row with only padding keeps its offset
        after = next_positions(request, model.manifest)
        answer.next_offset = np.where(count_real(request, model.manifest), after, offset[fed])
        answer.position_delta = None  # the offset is the next position
    if some:
        after = offset.copy()
        after[fed] = answer.next_offset
        if answer.next_context is not None and context is not None:
            contexts = context.values.reshape(len(offset), -1).copy()
            contexts[fed] = answer.next_context
            answer.next_context = contexts
        flat = {name: tensor.reshape(-1, *model.manifest.shapes[name]) for name, tensor in answer.arrays.items()}
        answer.tensors, answer.lengths, answer.next_offset = flat, ids.lengths, after
    return answer


def _check_row_count(field: str, rows: int, running: int) -> None:
    if rows != running:
        allowed = "one row" if running == 1 else f"{running} rows"
        raise Invalid(field, f"{rows} rows", f"{allowed}, as are running")


def _flatten(answer: EmbedResult, model: TokenModel) -> Mapping[str, Tensor]:
    """Return the tensors of a step with the values of a token in one dimension."""
    shapes = model.manifest.shapes
    if all(len(shapes[name]) == 1 for name in answer.tensors):
        return answer.tensors
    return {name: tensor.reshape(*tensor.shape[: -len(shapes[name])], -1) for name, tensor in answer.arrays.items()}


def split_step(step: TokenRequest, size: int) -> Iterator[TokenRequest]:
    """Split `step` into one or more steps with at most `size` tokens of each row.

    Raises:
        Invalid: another input has other lengths than the token ids.

    """
    check_all_lengths(step)
    longest = max(1, int(step.input_ids.lengths.max(initial=0)))
    return (step.columns(begin, begin + size) for begin in range(0, longest, size))
