"""The protocol of a decode stream without I/O.

`DecodeProtocol` yields effects and receives the outcome of each. The streams of `preblock/client/streams.py` carry
them out.
"""

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from preblock.client.api import HttpResponse, Row, Rows, model_path
from preblock.client.errors import ConnectionFailed, NoAnswer, StreamClosed, invalid, of_problem
from preblock.client.frames import (
    APPEND,
    CLOSING,
    DROP,
    ERROR,
    PING,
    REORDER,
    REWIND,
    STATE,
    VECTORS,
    AnswerFrame,
    MoveFrame,
    StepFrame,
    read_frame,
    write_frame,
)
from preblock.client.results import Vectors
from preblock.client.retry import pause
from preblock.client.token_ids import read_integers, read_rows

T = TypeVar("T")


@dataclass(frozen=True)
class Connect:
    """Connect to `path` at the server, and close the connection before it."""

    path: str


@dataclass(frozen=True)
class Exchange:
    """Send a message, and wait for the answer."""

    message: str | bytes


@dataclass(frozen=True)
class Pause:
    """Wait."""

    seconds: float


Effect = Connect | Exchange | Pause
Outcome = bytes | None | HttpResponse | NoAnswer
"""A message, nothing, an HTTP response instead of a WebSocket, or no answer."""
Effects = Generator[Effect, Outcome, T]


class DecodeProtocol:
    """The rows of a decode stream, and their offsets.

    Args:
        model: name of the model.
        version: version of the model; None for the highest at the first opening.
        fields: fields of the opening message.
        resume: whether to continue over a new connection after one breaks.

    """

    def __init__(self, model: str, version: int | None, fields: dict[str, Any], resume: bool) -> None:
        self._model, self._fields = model, fields
        self._resume, self._retries = resume, 0
        self._number = 0
        self._indices: list[str] = []
        self._unusable: str | None = "it was not opened"
        self._opened = False
        self.version = version
        self.offset: list[int] = []
        self.companions: dict[str, Vectors] = {}

    def open(self, retries: int) -> Effects[None]:
        """Open the stream. With `resume`, the opening and every later message is sent again at most `retries` times.

        Raises:
            ServiceError: the service refuses the stream.
            NoAnswer: no connection, or no answer in time.

        """
        self._retries = retries
        yield from self._persist(None)

    def step(
        self, /, ids: Rows, *, position_ids: Rows | None = None, attention_mask: Rows | None = None, **indices: Rows
    ) -> Effects[Vectors]:
        """Feed each row its next tokens, advance the offsets, and return the vectors.

        They are (R, L, D) if all rows have one length, else (T, D), the rows one after another.

        Args:
            ids: the next token ids of each row, as for `embed`; a row may be empty, but not all.
            position_ids: position index of each token, like `ids`; a row continues after the largest.
            attention_mask: 1 for a real token, 0 for padding, like `ids`; default 1.
            indices: `token_type_ids` and further inputs of the model, like `ids`.

        Raises:
            ServiceError: the step was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        values, lengths = read_rows("input_ids", ids)
        parts = {"input_ids": values}
        given = {"position_ids": position_ids, "attention_mask": attention_mask, **indices}
        for name, rows in given.items():
            if rows is not None:
                parts[name], other = read_rows(name, rows)
                if other.tolist() != lengths.tolist():
                    raise invalid(name, f"rows of {other.tolist()}", f"rows of {lengths.tolist()}, like input_ids")
        vectors, *companions = (yield from self._ask(StepFrame(parts, lengths), VECTORS)).tensors
        names = self._fields["output"][1:]
        self.companions = dict(zip(names, companions, strict=True))
        return vectors

    def rewind(self, offset: int | Row) -> Effects[None]:
        """Set rows back to an earlier offset, as after rejected draft tokens.

        Args:
            offset: offset of each row, at most the present one; an integer for all.

        Raises:
            ServiceError: it was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        yield from self._move(REWIND, "rewind", offset)

    def reorder(self, rows: Row) -> Effects[None]:
        """Let row i continue from the offset of row `rows[i]`, as in beam search. Rows may be omitted or repeated.

        Raises:
            ServiceError: it was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        yield from self._move(REORDER, "reorder", rows)

    def append(self, offset: int | Row) -> Effects[None]:
        """Add a row after the others for each of the offsets.

        Raises:
            ServiceError: it was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        yield from self._move(APPEND, "append", offset)

    def drop(self, rows: int | Row) -> Effects[None]:
        """End rows; those after them move up.

        Raises:
            ServiceError: it was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        yield from self._move(DROP, "drop", rows)

    def ping(self) -> Effects[None]:
        """Keep the stream from its idle timeout.

        Raises:
            StreamClosed: there was no answer.

        """
        yield from self._move(PING, "ping", [])

    def _move(self, kind: int, name: str, integers: int | Row) -> Effects[None]:
        yield from self._ask(MoveFrame(kind, read_integers(name, integers)), STATE)

    def _ask(self, operation: StepFrame | MoveFrame, kind: int) -> Effects[AnswerFrame]:
        answer = yield from self._persist((operation, kind))
        assert answer is not None
        return answer

    def _persist(self, request: tuple[StepFrame | MoveFrame, int] | None) -> Effects[AnswerFrame | None]:
        """Send an operation until it is answered or the retries are used up."""
        if self._opened and self._unusable is not None and not self._resume:
            raise StreamClosed(self._unusable, self.offset)
        for attempt in count():
            outcome = yield from self._try(request)
            if not isinstance(outcome, HttpResponse | NoAnswer):
                return outcome
            seconds = pause(outcome, attempt, self._retries) if self._resume else None
            if seconds is None:
                raise self._failure(outcome)
            yield Pause(seconds)
        raise AssertionError

    def _try(
        self, request: tuple[StepFrame | MoveFrame, int] | None
    ) -> Effects[AnswerFrame | HttpResponse | NoAnswer | None]:
        """Send an operation once, after connecting if necessary; without one, only connect."""
        if self._unusable is not None:
            failed = yield from self._connect()
            if failed is not None:
                return failed
        if request is None:
            return None
        operation, kind = request
        frame = write_frame(operation, self._number + 1, self.offset, self._indices)
        self._number += 1
        # Until the answer arrives, the offsets on this connection are unknown. A new connection states them.
        self._unusable = "the answer to the message before was not waited for"
        received = yield Exchange(frame)
        answer = self._read(received, kind)
        if isinstance(answer, NoAnswer):
            self._unusable = str(answer)
            return answer
        self._unusable = None
        if answer.kind == ERROR:
            raise of_problem(0, answer.text)
        self.offset = answer.offset
        return answer

    def _read(self, received: Outcome, kind: int) -> AnswerFrame | NoAnswer:
        if isinstance(received, NoAnswer):
            return received
        assert isinstance(received, bytes)
        try:
            answer = read_frame(received)
        except ValueError as error:
            return ConnectionFailed(f"{error} came")
        if answer.kind == CLOSING:
            return ConnectionFailed(f"the service closed the stream ({answer.text.decode(errors='replace')})")
        outputs = len(self._fields["output"]) if answer.kind == VECTORS else 0
        if answer.kind not in (kind, ERROR) or (answer.number, len(answer.tensors)) != (self._number, outputs):
            return ConnectionFailed("a frame came that answers another message")
        return answer

    def _connect(self) -> Effects[HttpResponse | NoAnswer | None]:
        """Open the stream at the offsets of its rows."""
        failed = yield Connect(model_path(self._model, self.version, "decode"))
        if failed is not None:
            assert not isinstance(failed, bytes)
            return failed
        if self._opened:
            # The service rejects an empty list of offsets.
            self._fields |= {"offset": self.offset or 0, "rows": len(self.offset)}
        received = yield Exchange(json.dumps({"open": self._fields}))
        if not isinstance(received, bytes):
            return received
        try:
            document = json.loads(received)
            if "error" in document:
                raise of_problem(0, json.dumps(document["error"]).encode())
            version, offset, indices = (document[name] for name in ("version", "next_offset", "indices"))
        except (KeyError, TypeError, ValueError):
            return ConnectionFailed(f"{received[:200]!r} came")
        self.version, self.offset, self._indices = version, offset, indices
        self._opened, self._unusable, self._number = True, None, 0
        return None

    def _failure(self, outcome: HttpResponse | NoAnswer) -> Exception:
        if isinstance(outcome, HttpResponse):
            return of_problem(outcome.status, outcome.body)
        return StreamClosed(str(outcome), self.offset) if self._opened else outcome


def decode(
    model: str,
    *,
    version: int | None = None,
    offset: int | Row = 0,
    rows: int | None = None,
    output: str = "embeddings",
    companions: Sequence[str] = (),
    dtype: str = "float32",
    resume: bool = False,
) -> DecodeProtocol:
    """Open a decode stream, for a `with` block; with an `AsyncClient`, `async with` and `await`.

    Args:
        model: name of the model.
        version: version of the model; default the highest at the first opening.
        offset: real tokens fed before, one number or one for each row.
        rows: number of rows, if `offset` is one number; default 1. May be 0.
        output: name of the output of a step.
        companions: further outputs, such as "rotary_cos" and "rotary_sin", found in `stream.companions` after a step.
        dtype: "float32", "float16" or "bfloat16".
        resume: whether to continue over a new connection after one breaks, with the retries and pauses of a call.

    Raises:
        ServiceError: the service refuses the stream.
        NoAnswer: no connection, or no answer in time.

    """
    given = read_integers("offset", offset).tolist()
    count = len(given) if rows is None else rows
    # The service rejects an empty list of offsets.
    fields = {"offset": given if count else 0, "rows": count, "output": [output, *companions], "dtype": dtype}
    return DecodeProtocol(model, version, fields, resume)
