"""Decode streams: `AsyncDecodeStream` speaks the protocol of `docs/decode.md`, and `DecodeStream` wraps it."""

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from preblock.client import frames
from preblock.client.errors import ConnectionFailed, NoAnswer, StreamClosed, invalid, of_problem
from preblock.client.frames import AnswerFrame, read_frame, write_move, write_step
from preblock.client.results import Vectors
from preblock.client.retry import retry
from preblock.client.sync_wrapper import Blocking, blocking, finish
from preblock.client.token_ids import Row, Rows, read_integers, read_rows
from preblock.client.transport import model_path

if TYPE_CHECKING:
    from preblock.client.sockets import Socket


class AsyncDecodeStream:
    """A decode stream, for `async with`. Concurrent calls run one after another.

    `companions` holds the further outputs of the last step by name, with the shape of its vectors except for the width.

    Args:
        socket: a WebSocket of the server.
        model: name of the model.
        version: version of the model; None for the highest at the first opening.
        fields: fields of the opening message.
        retries: most further attempts of the opening and of each message, over a new connection after one breaks; None
            ends the stream with its first connection.

    """

    def __init__(
        self, socket: "Socket", model: str, version: int | None, fields: dict[str, Any], retries: int | None
    ) -> None:
        self._socket, self._model, self._version, self._fields = socket, model, version, fields
        self._resume, self._retries = retries is not None, retries or 0
        self._turn = asyncio.Lock()  # answers arrive in order
        self._number = 0
        self._indices: list[str] = []
        self._offset: list[int] = []
        self.companions: dict[str, Vectors] = {}
        self._opened = False
        self._unusable: str | None = "it was not opened"

    @property
    def offset(self) -> list[int]:
        """Number of real tokens fed to each row; a new stream resumes there."""
        return list(self._offset)

    @property
    def version(self) -> int:
        """The version of the model."""
        assert self._version is not None
        return self._version

    async def step(
        self, /, ids: Rows, *, position_ids: Rows | None = None, attention_mask: Rows | None = None, **indices: Rows
    ) -> Vectors:
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

        def write(number: int) -> bytes:
            return write_step(parts, lengths, number, self._offset, self._indices)

        vectors, *companions = (await self._ask(write, frames.VECTORS)).tensors
        self.companions = dict(zip(self._fields["output"][1:], companions, strict=True))
        return vectors

    async def rewind(self, offset: int | Row) -> None:
        """Set rows back to an earlier offset, as after rejected draft tokens.

        Args:
            offset: offset of each row, at most the present one; an integer for all.

        Raises:
            ServiceError: it was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        await self._move(frames.REWIND, "rewind", offset)

    async def reorder(self, rows: Row) -> None:
        """Let row i continue from the offset of row `rows[i]`, as in beam search. Rows may be omitted or repeated.

        Raises:
            ServiceError: it was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        await self._move(frames.REORDER, "reorder", rows)

    async def append(self, offset: int | Row) -> None:
        """Add a row after the others for each of the offsets.

        Raises:
            ServiceError: it was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        await self._move(frames.APPEND, "append", offset)

    async def drop(self, rows: int | Row) -> None:
        """End rows; the rows after them move up.

        Raises:
            ServiceError: it was refused; it changed nothing, and the stream stays open.
            StreamClosed: there was no answer.

        """
        await self._move(frames.DROP, "drop", rows)

    async def ping(self) -> None:
        """Keep the stream from its idle timeout.

        Raises:
            StreamClosed: there was no answer.

        """
        await self._move(frames.PING, "ping", [])

    async def __aenter__(self) -> Self:
        try:
            await retry(self._connect, self._retries, self._socket.sleep)
        except BaseException:
            await self._socket.close(*sys.exc_info())
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._socket.close(*error)

    async def _move(self, kind: int, name: str, integers: int | Row) -> None:
        await self._ask(partial(write_move, kind, read_integers(name, integers)), frames.STATE)

    async def _ask(self, write: Callable[[int], bytes], kind: int) -> AnswerFrame:
        """Send the frame `write(number)` until it is answered or the retries are used up."""
        async with self._turn:
            if self._unusable is not None and not self._resume:
                raise StreamClosed(self._unusable, self.offset)
            try:
                return await retry(partial(self._exchange, write, kind), self._retries, self._socket.sleep)
            except NoAnswer as error:
                raise StreamClosed(str(error), self.offset) from error

    async def _connect(self) -> None:
        """Open the stream at the offsets of its rows."""
        await self._socket.connect(model_path(self._model, self._version, "decode"))
        if self._opened:
            # The service rejects an empty list of offsets.
            self._fields |= {"offset": self._offset or 0, "rows": len(self._offset)}
        received = await self._socket.exchange(json.dumps({"open": self._fields}))
        try:
            document = json.loads(received)
            if "error" in document:
                raise of_problem(0, json.dumps(document["error"]).encode())
            version, offset, indices = (document[name] for name in ("version", "next_offset", "indices"))
        except (KeyError, TypeError, ValueError) as error:
            raise ConnectionFailed(f"{received[:200]!r} came") from error
        self._version, self._offset, self._indices = version, offset, indices
        self._opened, self._unusable, self._number = True, None, 0

    async def _exchange(self, write: Callable[[int], bytes], kind: int) -> AnswerFrame:
        if self._unusable is not None:
            await self._connect()
        frame = write(self._number + 1)
        self._number += 1
        # Until the answer arrives, the offsets on this connection are unknown. A new connection states them.
        self._unusable = "the answer to the message before was not waited for"
        try:
            answer = self._read(await self._socket.exchange(frame), kind)
        except NoAnswer as error:
            self._unusable = str(error)
            raise
        self._unusable = None
        if answer.kind == frames.ERROR:
            raise of_problem(0, answer.text)
        self._offset = answer.offset
        return answer

    def _read(self, received: bytes, kind: int) -> AnswerFrame:
        try:
            answer = read_frame(received)
        except ValueError as error:
            raise ConnectionFailed(f"{error} came") from error
        if answer.kind == frames.CLOSING:
            raise ConnectionFailed(f"the service closed the stream ({answer.text.decode(errors='replace')})")
        outputs = len(self._fields["output"]) if answer.kind == frames.VECTORS else 0
        if answer.kind not in (kind, frames.ERROR) or (answer.number, len(answer.tensors)) != (self._number, outputs):
            raise ConnectionFailed("a frame came that answers another message")
        return answer


class DecodeStream(Blocking[AsyncDecodeStream]):
    """A decode stream, for `with` and one thread."""

    step = blocking(AsyncDecodeStream.step)
    rewind = blocking(AsyncDecodeStream.rewind)
    reorder = blocking(AsyncDecodeStream.reorder)
    append = blocking(AsyncDecodeStream.append)
    drop = blocking(AsyncDecodeStream.drop)
    ping = blocking(AsyncDecodeStream.ping)

    @property
    def offset(self) -> list[int]:
        """Number of real tokens fed to each row; a new stream resumes there."""
        return self._wrapped.offset

    @property
    def companions(self) -> dict[str, Vectors]:
        """The further outputs of the last step, by name. They have the shape of its vectors except for the width."""
        return self._wrapped.companions

    @property
    def version(self) -> int:
        """The version of the model."""
        return self._wrapped.version

    def __enter__(self) -> Self:
        finish(self._wrapped.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        finish(self._wrapped.__aexit__(*error))
