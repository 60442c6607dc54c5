"""Decode streams, in the protocol of `docs/decode.md`. Generated from `async_stream.py`."""

from __future__ import annotations  # help() then shows the names of types, not their unions

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from preblock.client import messages
from preblock.client.errors import ConnectionFailed, NoAnswer, StreamClosed, invalid
from preblock.client.messages import AnswerFrame, read_answer, write_json_step, write_move, write_step
from preblock.client.parts import Parts, Placeholder, write_parts
from preblock.client.results import Vectors
from preblock.client.retry import of_stream
from preblock.client.sync_retry import retry
from preblock.client.token_ids import (
    Row,
    Rows,
    add_indices,
    list_rows,
    read_integers,
    read_positions,
    read_rows,
    split_rows,
    to_json,
)
from preblock.client.transport import model_path

if TYPE_CHECKING:
    from preblock.client.sockets import SyncSocket


class DecodeStream:
    """A decode stream, from `Client.decode`. Concurrent calls run one after another.

    `with` opens and closes it. Without, the first message opens it, and `close` closes it.
    Every operation but `close` may raise these errors:

    - ServiceError: the service refused the message, or the stream while it opened. The message changed nothing, and an
      open stream stays open. While the service is too busy, the message is repeated like a call.
    - StreamClosed: no answer came; while the stream opens this is ConnectionFailed or TimedOut.

    Args:
        socket: a WebSocket of the server.
        model: name of the model.
        version: version of the model; None for the highest at the first opening.
        fields: fields of the opening message.
        retries: most further attempts of the opening and of each message.
        resume: whether to connect again after a connection breaks; otherwise the stream ends with its first one.

    """

    companions: dict[str, Vectors]
    """Further outputs of the last step, by name; each has the shape of the step's vectors except for the width."""

    def __init__(
        self,
        socket: SyncSocket,
        model: str,
        version: int | None,
        fields: dict[str, Any],
        retries: int,
        resume: bool,
    ) -> None:
        self._socket, self._model, self._version, self._fields = socket, model, version, fields
        self._resume, self._retries = resume, retries
        self._turns: dict[object, threading.Lock] = {}
        self._number = 0
        self._indices: list[str] = []
        self._identity: str | None = None
        self._offset: list[int] = list(fields["offset"] or [])
        self._context: list[list[int]] | None = fields.get("context")
        self.companions = {}
        self._opened = self._closed = False
        self._unusable: str | None = "it was not opened"

    @property
    def offset(self) -> list[int]:
        """Number of real tokens fed to each row; a new stream resumes there."""
        if not self._opened and len(self._offset) == 1:
            return self._offset * int(self._fields["rows"])
        return list(self._offset)

    @property
    def context(self) -> list[list[int]] | None:
        """The ids before the next token of each row, to resume with; None for outputs without history."""
        return None if self._context is None else [list(row) for row in self._context]

    @property
    def version(self) -> int | None:
        """The version of the model; before the stream opens the requested one, None for the highest."""
        return self._version

    def step(
        self,
        ids: Rows | None = None,
        *,
        parts: Parts | None = None,
        placeholder: Placeholder | None = None,
        position_ids: Rows | Sequence[Rows] | None = None,
        position_rows: Rows | None = None,
        attention_mask: Rows | None = None,
        token_type_ids: Rows | None = None,
        indices: Mapping[str, Rows] | None = None,
    ) -> Vectors:
        """Feed each row its next tokens, advance the offsets, and return the vectors.

        They are (R, L, D) if all rows have one length, else (T, D), the rows one after another.

        Args:
            ids: the next token ids of each row, as for `embed`; a row may be empty, but not all.
            parts: instead of `ids`: the next parts of one row, or of each row; a row may be empty, but not all.
            placeholder: with `parts`: a token id, and the vectors in place of its tokens.
            position_ids: position index of each token, like `ids`; or on three axes, (3, R, L) or three lists of rows.
                A row continues after the largest.
            position_rows: instead of `position_ids`: row of the position table of each token, as for `embed`.
            attention_mask: 1 for a real token, 0 for padding, like `ids`; default 1.
            token_type_ids: segment of each token, like `ids`; default 0.
            indices: further inputs in `Model.indices`, by name, each like `ids`.

        """
        inputs: dict[str, Any] = {
            "position_ids": position_ids,
            "position_rows": position_rows,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
        }
        given = add_indices(inputs, indices)
        made = write_parts(parts, placeholder)
        write = self._write_parts(ids, made, given) if made else self._write_ids(ids, given)
        vectors, *companions = (self._ask(write, messages.VECTORS)).tensors
        self.companions = dict(zip(self._fields["output"][1:], companions, strict=True))
        return vectors

    def _write_parts(self, ids: Rows | None, made: dict[str, Any], given: dict[str, Rows]) -> Callable[[int], str]:
        """Return a function of the number that writes a step of parts; the service refuses other fields."""
        others = given if ids is None else {"input_ids": ids, **given}
        fields = made | {name: list_rows(name, rows) for name, rows in others.items()}
        return lambda number: write_json_step(fields, number, self._offset)

    def _write_ids(self, ids: Rows | None, given: dict[str, Any]) -> Callable[[int], str | bytes]:
        """Return a function of the number that writes a step of ids: a frame, or JSON if no flag names an input."""
        if ids is None:
            raise invalid("input_ids", "nothing", "rows of token ids, or parts")
        values, lengths = read_rows("input_ids", ids)
        tensors = {"input_ids": values}
        for name, rows in given.items():
            tensors[name], other = read_positions(rows) if name == "position_ids" else read_rows(name, rows)
            if other.tolist() != lengths.tolist():
                raise invalid(name, f"rows of {other.tolist()}", f"rows of {lengths.tolist()}, like input_ids")

        def write(number: int) -> str | bytes:
            if given.keys().isdisjoint(self._indices[messages.MAX_FURTHER_INPUTS :]):
                return write_step(tensors, lengths, number, self._offset, self._indices)
            fields = {name: split_rows(values, lengths) for name, values in tensors.items()}
            return write_json_step(fields, number, self._offset)

        return write

    def rewind(self, offset: int | Row) -> None:
        """Set rows back to an earlier offset, as after rejected draft tokens.

        Args:
            offset: offset of each row, at most the present one; an integer for all.

        """
        self._move(messages.REWIND, "rewind", offset)

    def reorder(self, rows: Row) -> None:
        """Let row i continue from the offset of row `rows[i]`, as in beam search. Rows may be omitted or repeated."""
        self._move(messages.REORDER, "reorder", rows)

    def append(self, offset: int | Row, context: Rows | None = None) -> None:
        """Add a row after the others for each of the offsets.

        `context` has the last ids before each, as for `embed`.
        """
        self._move(messages.APPEND, "append", offset, context)

    def drop(self, rows: int | Row) -> None:
        """End rows; the rows after them move up."""
        self._move(messages.DROP, "drop", rows)

    def ping(self) -> None:
        """Keep the stream from its idle timeout."""
        self._move(messages.PING, "ping", [])

    def close(self) -> None:
        """End the stream and close its connection. Its messages then raise `StreamClosed`."""
        self.__exit__()

    def __enter__(self) -> Self:
        with self._turn():
            self._open()
        return self

    def __exit__(self, *error: Any) -> None:
        self._closed = True
        self._socket.close(*error)

    def _turn(self) -> threading.Lock:
        """Return the lock of the running owner: answers arrive in order. After a fork, the parent's may never open."""
        return self._turns.setdefault(self._socket.owner(), threading.Lock())

    def _move(self, kind: int, name: str, integers: int | Row, context: Rows | None = None) -> None:
        moved, ids = read_integers(name, integers), None if context is None else read_rows("context", context)[0]

        def write(number: int) -> bytes:
            if ids is not None and self._context is None:
                raise invalid("context", ids.tolist(), "none: no output of this stream depends on the ids before a row")
            return write_move(kind, moved, number, ids)

        self._ask(write, messages.STATE)

    def _ask(self, write: Callable[[int], str | bytes], kind: int) -> AnswerFrame:
        """Send the message `write(number)` until it is answered or the retries are used up."""
        with self._turn():
            self._open()
            if self._unusable is not None and not self._resume:
                raise StreamClosed(self._unusable, self.offset)

            def attempt() -> AnswerFrame:
                return self._exchange(write, kind)

            try:
                return retry(attempt, self._retries, self._socket.sleep)
            except NoAnswer as error:
                raise StreamClosed(str(error), self.offset) from error

    def _open(self) -> None:
        """Open the stream, unless it is open."""
        if self._closed:
            raise StreamClosed("the stream was closed by its user", self.offset)
        if self._opened:
            return
        try:
            retry(self._connect, self._retries if self._resume else 0, self._socket.sleep)
        except BaseException:
            self._socket.close(*sys.exc_info())
            raise

    def _connect(self) -> None:
        """Open the stream at the offsets of its rows."""
        self._socket.connect(model_path(self._model, self._version, "decode"))
        if self._opened:
            # The service rejects an empty list of offsets.
            self._fields |= {"offset": self._offset or 0, "rows": len(self._offset)}
            if "context" in self._fields or self._context is not None:
                self._fields["context"] = self._context or None
        received = self._socket.exchange(f'{{"open": {to_json(self._fields)}}}')
        try:
            document = json.loads(received)
            if "error" in document:
                raise of_stream(json.dumps(document["error"]).encode())
            names = ("version", "identity", "next_offset", "indices")
            version, identity, offset, indices = (document[name] for name in names)
        except (KeyError, TypeError, ValueError) as error:
            raise ConnectionFailed(f"the server opened no decode stream: it sent {received[:200]!r}") from error
        if self._identity not in (None, identity):
            got = f"identity: got {identity}, expected {self._identity}"
            raise ConnectionFailed(f"{got}: version {version} of {self._model!r} is another artifact there")
        self._version, self._offset, self._indices, self._identity = version, offset, indices, identity
        self._context = document.get("next_context")
        self._opened, self._unusable, self._number = True, None, 0

    def _exchange(self, write: Callable[[int], str | bytes], kind: int) -> AnswerFrame:
        if self._unusable is not None:
            self._connect()
        frame = write(self._number + 1)
        self._number += 1
        # Until the answer arrives, the offsets on this connection are unknown. A new connection states them.
        self._unusable = "the answer to the message before was not waited for"
        try:
            answer = self._read(self._socket.exchange(frame), kind)
        except NoAnswer as error:
            self._unusable = str(error)
            if not self._resume:
                error.retry_after = None
            raise
        self._unusable = None
        if answer.kind == messages.ERROR:
            raise of_stream(answer.text)
        self._offset, self._context = answer.offset, answer.context
        return answer

    def _read(self, received: bytes, kind: int) -> AnswerFrame:
        try:
            answer = read_answer(received)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConnectionFailed(f"the server sent no answer of a decode stream: {error}") from error
        if answer.kind == messages.CLOSING:
            raise ConnectionFailed(f"the service closed the stream ({answer.text.decode(errors='replace')})")
        outputs = len(self._fields["output"]) if answer.kind == messages.VECTORS else 0
        if answer.kind not in (kind, messages.ERROR) or (answer.number, len(answer.tensors)) != (self._number, outputs):
            raise ConnectionFailed("the server sent an answer to another message")
        return answer
