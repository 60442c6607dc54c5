"""A decode session: turns each message of a client into an answer, for every protocol of a decode stream.

Letters: R rows of the stream.
"""

from functools import partial
from time import perf_counter
from typing import Any, Literal

from preblock.service.api.http import errors
from preblock.service.api.http.request import merge_fields
from preblock.service.api.streams import StreamEnd
from preblock.service.codecs import decode_frames, decode_json
from preblock.service.codecs.chunks import Buffer, raw_bytes
from preblock.service.codecs.native_json import TEXT_COPIES, read_json
from preblock.service.core.decode_ops import CloseOp, DecodeMessage, StepOp
from preblock.service.core.errors import Conflict, PreblockError
from preblock.service.engine.decode_stream import DecodeState
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
                record.operation = message.operation.name
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
                record.operation = message.operation.name
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
            run.record.operation = StepOp.name
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
        model = self.stream.model
        self._open(model, fields)
        self.opened = True
        manifest, outputs = model.manifest, self.stream.options.outputs
        return decode_json.write_opened(
            model.name, model.version, model.identity, manifest, self.stream.running, outputs
        )

    def _done(self, message: DecodeMessage) -> None:
        self.opened = True
        if isinstance(message.operation, CloseOp):
            raise StreamEnd("close")
