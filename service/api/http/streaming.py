"""Decode sessions: each message of a client becomes an answer, for every protocol of a decode stream.

Over HTTP, a stream is lines of JSON in both directions, or server-sent events for a given list of ids.

Letters: R rows of the stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from time import perf_counter
from typing import Any, Literal

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from preblock.service.api.http import errors
from preblock.service.api.http.negotiation import EVENTS, NDJSON
from preblock.service.api.http.request import merge_fields
from preblock.service.api.streams import StreamEnd, StreamLifetime, StreamRegistry
from preblock.service.codecs import decode_frames, decode_json
from preblock.service.codecs.chunks import Buffer, raw_bytes
from preblock.service.codecs.native_json import TEXT_COPIES, read_json
from preblock.service.core.decode_ops import STEP, CloseOp, DecodeMessage, RunningRows
from preblock.service.core.errors import Conflict, PreblockError, TooLarge
from preblock.service.core.large_bodies import AwaitedBody
from preblock.service.core.types import PartsRequest, TokenRequest
from preblock.service.engine.decode_stream import DecodeState, split_step
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastRun, fast_path_of
from preblock.service.engine.plain_calls import Call
from preblock.service.observability.context import CURRENT_REQUEST
from preblock.service.runtime.model import TokenModel

FRAME_COPIES = 3
"""Vectors, their frame, and the copy that a WebSocket sends."""


class DecodeSession:
    """A decode stream and the state of its client.

    Args:
        engine: runs the steps.
        model: model of the whole stream.
        query: options of the stream in the query. An `open` message can add further ones.

    Attributes:
        sent: rows after the last answer sent. An answer without delivery has fed nothing.
        message_format: format of the client's last message; None before the first message.

    Raises:
        ClientFault: an option is not allowed.

    """

    def __init__(self, engine: Engine, model: TokenModel, query: dict[str, Any]) -> None:
        self.engine = engine
        self.context = CURRENT_REQUEST.get()
        self.opened = False
        self._query = query
        self._open(model, query)
        self.sent = self.stream.running
        self.message_format: Literal["text", "frame"] | None = None
        self._error: PreblockError | None = None  # of the started step

    def _open(self, model: TokenModel, fields: dict[str, Any]) -> None:
        options, encoding = decode_json.read_options(fields)
        self.stream = DecodeState(self.engine, model, options)
        self._encoding = encoding
        manifest = model.manifest
        self._forms = tuple((manifest.widths[name], manifest.dtype_of(name, options.dtype)) for name in options.outputs)
        self._fast_path = fast_path_of(self.engine, model, options.outputs, options.dtype, "decode", of_stream=True)

    async def answer_text(self, text: bytes) -> bytes:
        """Answer a JSON message. An error leaves the stream unchanged, and is answered with the key `error`.

        Raises:
            StreamEnd: the client ends the stream.

        """
        engine, stream = self.engine, self.stream
        number = 0
        indices = stream.model.manifest.indices
        try:
            with engine.admission.request("decode") as record, stream.attempt():
                record.model, record.copies = stream.model.name, TEXT_COPIES
                await engine.admission.reserve(record, len(text))
                read_document = partial(read_json, text, engine.limits.max_parsed_values(len(indices)))
                document = await engine.scheduler.run(len(text), read_document, text=True)
                if decode_json.OPEN in document:
                    return self._reopen(document)
                number = decode_json.read_number(document)
                read = partial(decode_json.read_message, document, number, text, indices)
                message = await engine.scheduler.run(len(text), read, text=True)
                answer = await stream.do(message, record)
                if answer is None:
                    written = decode_json.write_state(stream.running, number)
                else:
                    write = partial(decode_json.write_answer, answer, self._encoding, number)
                    written = await engine.scheduler.run(answer.size, write, text=self._encoding == "float")
        except PreblockError as error:
            return decode_json.write_error(errors.problem(error), number)
        self._done(message)
        return written

    async def answer_frame(self, frame: bytes) -> bytes:
        """Answer a frame. An error leaves the stream unchanged, and is answered with a frame.

        Raises:
            StreamEnd: the client ends the stream.

        """
        engine, stream = self.engine, self.stream
        number = decode_frames.read_number(frame)
        try:
            with engine.admission.request("decode") as record, stream.attempt():
                record.model, record.copies = stream.model.name, FRAME_COPIES
                await engine.admission.reserve(record, len(frame))
                indices, history = stream.model.manifest.indices, stream.history
                read = partial(decode_frames.read_frame, frame, indices, history)
                message = await engine.scheduler.run(len(frame), read)
                answer = await stream.do(message, record)
                if answer is None:
                    written = decode_frames.write_state(stream.running, number)
                else:
                    write = partial(decode_frames.write_vectors, answer, number)
                    written = await engine.scheduler.run(answer.size, write)
        except PreblockError as error:
            return decode_frames.write_error(errors.problem(error), number)
        self._done(message)
        return written

    def begin(self, frame: bytes) -> FastRun | None:
        """Start the run of a simple, valid step; call `finish` in the next event-loop iteration.

        Return None for any other message.
        """
        began, stream, fast_path = perf_counter(), self.stream, self._fast_path
        step = None if fast_path is None else decode_frames.read_simple_step(frame)
        if (
            fast_path is None
            or step is None
            or step.shape.rows != len(stream.offset)
            or (step.offset and step.offset != stream.offset.tobytes())
            or (step.number and not stream.is_new(step.number))
        ):
            return None
        context = None if stream.histories is None else stream.histories.context
        call = Call(step.ids, step.shape.rows, step.shape.length, stream.offset, context, size=len(frame))
        run = fast_path.start(call, began)
        if run is not None:
            run.record.operation = STEP
            self._begun = frame, step
        return run

    def finish(self, run: FastRun) -> list[Buffer]:
        """Advance the stream by the started step; return the parts of the frame of its answer.

        An error leaves the stream unchanged, and is answered with an error frame.
        """
        stream, (frame, step) = self.stream, self._begun
        try:
            vectors = run.result()
        except PreblockError as error:
            self._error = error
            return [decode_frames.write_error(errors.problem(error), step.number)]
        after = stream.offset + step.shape.advance
        histories = None if stream.histories is None else stream.histories.extended(step.ids)
        stream.advance(after, step.number, decode_json.digest(frame) if step.number else b"", histories)
        self.opened = True
        header = decode_frames.write_simple_step_header(step, stream.running, self._forms)
        return [header, *map(raw_bytes, vectors)]

    def end(self, run: FastRun, size: int, send: float) -> None:
        """Record the started step, with the bytes and seconds of its answer; `size` is 0 if it was not sent."""
        frame, _ = self._begun
        if size:
            self.sent, self.message_format = self.stream.running, "frame"
        error, self._error = self._error, None
        run.end(error)
        self.engine.metrics.count_bytes("decode", len(frame), size, 0, send)

    def _reopen(self, document: dict[str, Any]) -> bytes:
        """Open the stream again with the options of its query and of its first message."""
        if self.opened:
            message = "an open message must be the first message of its stream"
            raise Conflict(decode_json.OPEN, "a later message", "the first message", message=message)
        fields = merge_fields(self._query, decode_json.read_open(document), "open message")
        self._open(self.stream.model, fields)
        self.opened = True
        stream = self.stream
        return decode_json.write_opened(stream.model, stream.running, stream.options.outputs)

    def _done(self, message: DecodeMessage) -> None:
        self.opened = True
        if isinstance(message.operation, CloseOp):
            raise StreamEnd("close")


HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""A buffering proxy would hold each answer back until the next one."""
CLOSE_TIMEOUT_SECONDS = 2.0
"""Time for the client to read the close message of a stream."""
Answers = AsyncGenerator[tuple[bytes, RunningRows], None]
"""Encoded answers, each with the rows after it."""
Source = Callable[[StreamLifetime, Receive], Answers]
"""Returns the answers, given the limits of the stream and the `receive` of ASGI."""
EventWriter = Callable[[str, bytes], bytes]
"""Returns the message of an event, given its name and its JSON document."""


class StreamResponse(Response):
    """Sends answers as soon as they are ready, then a close message with the rows after the last answer sent.

    Args:
        streams: registry of the open streams.
        media: content type.
        running: rows before the first answer.
        answers: source of the answers.
        write_event: writes the close message, an `error` or `closing` event.

    Raises:
        Unavailable: too many streams are open.

    """

    def __init__(
        self, streams: StreamRegistry, media: str, running: RunningRows, answers: Source, write_event: EventWriter
    ) -> None:
        super().__init__(media_type=media, headers=HEADERS)
        del self.headers["Content-Length"]
        self._running, self._answers, self._write_event = running, answers, write_event
        self._stack = ExitStack()
        self._lifetime = self._stack.enter_context(streams.open())  # here, so that the request records a refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI passes it
        """Send the answers until they end, the client leaves, or the stream reaches a limit."""
        last, context, lifetime = b"", CURRENT_REQUEST.get(), self._lifetime
        # The client's view: an answer without delivery has changed nothing.
        sent = self._running
        with self._stack:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if context is not None:
                context.on_disconnect = partial(lifetime.end, "left")
            try:
                async with aclosing(self._answers(lifetime, receive)) as answers:
                    async for answer, running in answers:
                        await lifetime.wait(partial(send, _body(answer)))
                        sent = running
                        if context is not None and context.held:
                            context.keep(2 * len(answer))  # with the copy in the transport
                            await lifetime.wait(partial(send, _body(b"")))  # until the client has read the answer
                            context.release()
                        # Lets other tasks run: neither reading nor writing yields while messages wait.
                        await asyncio.sleep(0)
            except PreblockError as error:
                last = self._write_event("error", decode_json.write_error(errors.problem(error)))
            except StreamEnd as end:
                last = self._write_event("closing", decode_json.write_state(sent, closing=end.reason))
        with suppress(TimeoutError):  # the client does not read
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await send(_body(last, more=False))


def _body(content: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def answer_lines(streams: StreamRegistry, session: DecodeSession) -> StreamResponse:
    """Return the response with an answer for each line of the request body; raise Unavailable as `StreamResponse`."""

    async def answers(lifetime: StreamLifetime, receive: Receive) -> Answers:
        limits = session.engine.limits
        reader = LineReader(receive, limits.max_body_bytes)
        # An empty chunk tells the client that it may write.
        yield b"", session.stream.running
        while True:
            async with limits.incoming.arrive() as body:
                line = await lifetime.wait(partial(reader.line, body))
                if line is None:
                    return
                body.complete()
                answer = await session.answer_text(line)
            yield answer + b"\n", session.stream.running

    return StreamResponse(streams, NDJSON, session.stream.running, answers, lambda _, document: document + b"\n")


class LineReader:
    """Splits a request body into lines.

    Args:
        receive: of ASGI.
        max_line_bytes: maximum size of a line.

    """

    def __init__(self, receive: Receive, max_line_bytes: int) -> None:
        self._receive, self._max_line_bytes = receive, max_line_bytes
        self._bytes = bytearray()
        self._searched = 0
        self._more = True

    async def line(self, incoming: AwaitedBody) -> bytes | None:
        """Return the next line with content; None at the end of the body, or after the client left.

        `incoming` counts the bytes of an incomplete line.

        Raises:
            TooLarge: a line is too long; the rest of the stream cannot be read.

        """
        while True:
            end = self._bytes.find(b"\n", self._searched)
            if end < 0 and self._more and len(self._bytes) <= self._max_line_bytes:
                self._searched = len(self._bytes)
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    return None
                self._bytes += message.get("body", b"")
                self._more = message.get("more_body", False)
                if self._more and self._bytes.find(b"\n", self._searched) < 0:
                    await incoming.wait(len(self._bytes))
                continue
            size = len(self._bytes) if end < 0 else end
            if size > self._max_line_bytes:
                raise TooLarge("line", f"{size} bytes", f"at most {self._max_line_bytes} bytes")
            line = bytes(self._bytes[:size]).strip()
            del self._bytes[: size + 1]
            self._searched = 0
            if line:
                return line
            if end < 0:
                return None


async def answer_events(
    streams: StreamRegistry, engine: Engine, model: TokenModel, body: bytes, query: dict[str, Any]
) -> StreamResponse:
    """Return the response with an event for each chunk of the ids in the request; a query needs no body.

    The first event is computed at once, so that its error still has a status of its own.

    Raises:
        ClientFault: the request, or its first chunk, is not allowed.
        Unavailable: as `StreamResponse`.

    """
    indices = model.manifest.indices

    def read() -> decode_json.Feed:
        document = read_json(body, engine.limits.max_parsed_values(len(indices))) if body or not query else {}
        return decode_json.read_feed(merge_fields(query, document), indices)

    feed = await engine.scheduler.run(len(body), read, text=True)
    stream = DecodeState(engine, model, feed.options)
    step = await stream.assemble(feed.step) if isinstance(feed.step, PartsRequest) else feed.step
    running, events = stream.running, _write_events(engine, stream, feed, step)
    first = await anext(events)

    async def answers(_: StreamLifetime, receive: Receive) -> Answers:
        event: tuple[bytes, RunningRows] | None = first
        left = asyncio.ensure_future(receive())
        try:
            while event is not None and not left.done():
                yield event
                event = await anext(events, None)
        finally:
            left.cancel()
            await events.aclose()

    return StreamResponse(streams, EVENTS, running, answers, _write_event)


async def _write_events(engine: Engine, stream: DecodeState, feed: decode_json.Feed, rows: TokenRequest) -> Answers:
    """Feed the tokens `rows` to the stream chunk by chunk, and yield an event for each.

    The id of an event is the number of tokens fed so far, of the longest row in each chunk.
    """
    fed = 0
    for step in split_step(rows, feed.chunk):
        # The limits hold for the request, not for each of its chunks.
        with engine.admission.request("decode", limited=False) as record, stream.attempt():
            record.model, record.copies = stream.model.name, TEXT_COPIES
            answer = await stream.do(DecodeMessage(step), record)
            assert answer is not None
            write = partial(decode_json.write_answer, answer, feed.encoding, 0)
            written = await engine.scheduler.run(answer.size, write, text=feed.encoding == "float")
        fed += int(answer.lengths.max())
        del answer, write  # a client that does not read would keep them
        yield b"id: %d\ndata: %b\n\n" % (fed, written), stream.running
    yield _write_event("end", decode_json.write_state(stream.running)), stream.running


def _write_event(event: str, document: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), document)
