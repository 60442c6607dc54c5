"""A decode stream without its connection: what is to be done next, whatever it is done with.

`Decoding` yields effects, and is sent what came of each; the streams of `preblock/client/streams.py` carry them out.
"""

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

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
    Answer,
    Move,
    Step,
    read_frame,
    write_frame,
)
from preblock.client.requests import Reply, Row, Rows, decode_path
from preblock.client.results import Vectors
from preblock.client.retry import pause
from preblock.client.token_ids import read_integers, read_rows

T = TypeVar("T")


@dataclass(frozen=True)
class Connect:
    """Connect to `path` at the server; what was connected before is left."""

    path: str


@dataclass(frozen=True)
class Exchange:
    """Send a message, and wait for one."""

    message: str | bytes


@dataclass(frozen=True)
class Pause:
    """Wait."""

    seconds: float


Effect = Connect | Exchange | Pause
Outcome = bytes | None | Reply | NoAnswer
"""What came: a message, nothing, an HTTP answer instead of a WebSocket, or no answer."""
Effects = Generator[Effect, Outcome, T]


class Decoding:
    """Rows that are fed step by step, and where they are.

    Args:
        model: name of the model.
        version: of the model; None for the highest. That which is opened first stays.
        fields: how the stream opens.
        resume: whether it goes on through another connection where one breaks.

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
        """Open the stream; with `resume` a message is sent again at most `retries` times, and so is this.

        Raises:
            ServiceError: the service refuses it.
            NoAnswer: no connection, or no answer in time.

        """
        self._retries = retries
        yield from self._persist(None)

    def step(
        self, /, ids: Rows, *, position_ids: Rows | None = None, attention_mask: Rows | None = None, **indices: Rows
    ) -> Effects[Vectors]:
        """Feed each row its next tokens, advance the offsets, and return the vectors.

        They are (R, L, D) where all rows have one length, else (T, D), the rows one after another.

        Args:
            ids: of each row the next token ids, as for `embed`; a row may be empty, but not all.
            position_ids: position index of each token, like `ids`; a row goes on after the largest.
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
        vectors, *companions = (yield from self._ask(Step(parts, lengths), VECTORS)).tensors
        names = self._fields["output"][1:]
        self.companions = dict(zip(names, companions, strict=True))
        return vectors

    def rewind(self, offset: int | Row) -> Effects[None]:
        """Go back, as after drafts that were refused.

        Args:
            offset: of each row, at most the present one; an integer for all.

        Raises:
            ServiceError: it was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        yield from self._move(REWIND, "rewind", offset)

    def reorder(self, rows: Row) -> Effects[None]:
        """Let row i go on from where row `rows[i]` is, as in beam search; rows may be left out and repeated.

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
        """Say that the client is still there.

        Raises:
            StreamClosed: there was no answer.

        """
        yield from self._move(PING, "ping", [])

    def _move(self, kind: int, name: str, integers: int | Row) -> Effects[None]:
        yield from self._ask(Move(kind, read_integers(name, integers)), STATE)

    def _ask(self, operation: Step | Move, kind: int) -> Effects[Answer]:
        answer = yield from self._persist((operation, kind))
        assert answer is not None
        return answer

    def _persist(self, asked: tuple[Step | Move, int] | None) -> Effects[Answer | None]:
        """Ask until there is an answer, as long as that may help."""
        if self._opened and self._unusable is not None and not self._resume:
            raise StreamClosed(self._unusable, self.offset)
        for attempt in count():
            outcome = yield from self._try(asked)
            if not isinstance(outcome, Reply | NoAnswer):
                return outcome
            seconds = pause(outcome, attempt, self._retries) if self._resume else None
            if seconds is None:
                raise self._failure(outcome)
            yield Pause(seconds)
        raise AssertionError

    def _try(self, asked: tuple[Step | Move, int] | None) -> Effects[Answer | Reply | NoAnswer | None]:
        """Ask once, connecting first where that is needed; where nothing is asked, connect."""
        if self._unusable is not None:
            failed = yield from self._connect()
            if failed is not None:
                return failed
        if asked is None:
            return None
        operation, kind = asked
        frame = write_frame(operation, self._number + 1, self.offset, self._indices)
        self._number += 1
        # Until the answer is here, nobody knows where the rows of this connection are. A new one is told.
        self._unusable = "the answer to the message before was not waited for"
        came = yield Exchange(frame)
        answer = self._read(came, kind)
        if isinstance(answer, NoAnswer):
            self._unusable = str(answer)
            return answer
        self._unusable = None
        if answer.kind == ERROR:
            raise of_problem(0, answer.text)
        self.offset = answer.offset
        return answer

    def _read(self, came: Outcome, kind: int) -> Answer | NoAnswer:
        if isinstance(came, NoAnswer):
            return came
        assert isinstance(came, bytes)
        try:
            answer = read_frame(came)
        except ValueError as error:
            return ConnectionFailed(f"{error} came")
        if answer.kind == CLOSING:
            return ConnectionFailed(f"the service closed the stream ({answer.text.decode(errors='replace')})")
        outputs = len(self._fields["output"]) if answer.kind == VECTORS else 0
        if answer.kind not in (kind, ERROR) or (answer.number, len(answer.tensors)) != (self._number, outputs):
            return ConnectionFailed("a frame came that answers another message")
        return answer

    def _connect(self) -> Effects[Reply | NoAnswer | None]:
        """Open the stream where its rows are."""
        failed = yield Connect(decode_path(self._model, self.version))
        if failed is not None:
            assert not isinstance(failed, bytes)
            return failed
        if self._opened:
            # An empty list is no offset of a stream without rows.
            self._fields |= {"offset": self.offset or 0, "rows": len(self.offset)}
        came = yield Exchange(json.dumps({"open": self._fields}))
        if not isinstance(came, bytes):
            return came
        try:
            document = json.loads(came)
            if "error" in document:
                raise of_problem(0, json.dumps(document["error"]).encode())
            version, offset, indices = (document[name] for name in ("version", "next_offset", "indices"))
        except (KeyError, TypeError, ValueError):
            return ConnectionFailed(f"{came[:200]!r} came")
        self.version, self.offset, self._indices = version, offset, indices
        self._opened, self._unusable, self._number = True, None, 0
        return None

    def _failure(self, outcome: Reply | NoAnswer) -> Exception:
        if isinstance(outcome, Reply):
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
) -> Decoding:
    """Open a stream that is fed step by step, for a `with` block; with an `AsyncClient`, `async with` and `await`.

    Args:
        model: name of the model.
        version: of the model; default the highest, which then stays.
        offset: real tokens fed before, one number or one for each row.
        rows: how many, where `offset` is one number; default 1. May be 0.
        output: what a step returns.
        companions: further outputs, such as "rotary_cos" and "rotary_sin": `stream.companions` has those of the last
            step.
        dtype: "float32", "float16" or "bfloat16".
        resume: whether a connection that breaks is followed by another that goes on where the last answer ended, as
            often and after such pauses as a call is sent again.

    Raises:
        ServiceError: the service refuses the stream.
        NoAnswer: no connection, or no answer in time.

    """
    given = read_integers("offset", offset).tolist()
    count = len(given) if rows is None else rows
    # A stream without rows has no list of offsets.
    fields = {"offset": given if count else 0, "rows": count, "output": [output, *companions], "dtype": dtype}
    return Decoding(model, version, fields, resume)
