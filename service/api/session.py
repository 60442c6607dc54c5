"""What the doors of a decode stream share: a message in, its answer out, errors included."""

from typing import Any

from incipit.service.api import problems
from incipit.service.decode import DecodeStream
from incipit.service.engine import Engine
from incipit.service.errors import Conflict, IncipitError
from incipit.service.operations import Close, Message
from incipit.service.repository import Model
from incipit.service.streams import Closing
from incipit.service.wire import frames, steps
from incipit.service.wire.native import read_json


class Session:
    """A stream, and how its client speaks.

    Args:
        engine: answers the steps.
        model: stays the same for the whole stream.
        fields: how the stream opens, as a query or a message of JSON states it.

    Raises:
        ClientFault: it cannot be opened so.

    """

    def __init__(self, engine: Engine, model: Model, fields: dict[str, Any]) -> None:
        self._engine = engine
        self._fresh = True
        self._open(model, fields)

    def _open(self, model: Model, fields: dict[str, Any]) -> None:
        options, encoding = steps.read_options(fields)
        self.stream = DecodeStream(self._engine, model, options)
        self._encoding = encoding

    async def answer_text(self, text: bytes) -> bytes:
        """Answer a message of JSON; an error changes nothing and is a JSON object with the key `error`.

        Raises:
            Closing: the client ends the stream.

        """
        engine, stream = self._engine, self.stream
        number = 0
        try:
            with engine.request("decode") as observation, stream.attempt():
                observation.model = stream.model.name
                document = await engine.scheduler.run(len(text), lambda: read_json(text), text=True)
                if steps.OPEN in document:
                    return self._reopen(document)
                indices = stream.model.manifest.indices
                number = steps.read_number(document)
                message = await engine.scheduler.run(
                    len(text), lambda: steps.read_message(document, number, text, indices), text=True
                )
                answer = await stream.do(message)
                if answer is None:
                    written = steps.write_state(stream.offset, number)
                else:
                    written = await engine.scheduler.run(
                        answer.size,
                        lambda: steps.write_answer(answer, self._encoding, number),
                        text=self._encoding == "float",
                    )
        except IncipitError as error:
            return steps.write_error(problems.problem(error), number)
        self._done(message)
        return written

    async def answer_frame(self, frame: bytes) -> bytes:
        """Answer a binary message in its version; an error changes nothing and is a frame too.

        Raises:
            Closing: the client ends the stream.

        """
        engine, stream = self._engine, self.stream
        version, number = frames.header_of(frame)
        try:
            with engine.request("decode") as observation, stream.attempt():
                observation.model = stream.model.name
                indices = stream.model.manifest.indices
                message = await engine.scheduler.run(len(frame), lambda: frames.read_frame(frame, indices))
                answer = await stream.do(message)
                if answer is None:
                    written = frames.write_state(stream.offset, number)
                else:
                    written = await engine.scheduler.run(
                        answer.size, lambda: frames.write_vectors(answer, number, version)
                    )
        except IncipitError as error:
            return frames.write_error(problems.problem(error), number, version)
        self._done(message)
        return written

    def _reopen(self, document: dict[str, Any]) -> bytes:
        """Open the stream anew, as its first message may say."""
        if not self._fresh:
            raise Conflict(steps.OPEN, "a message that opens, after others", "none, since the stream has begun")
        fields = steps.read_open(document)
        model = self.stream.model
        self._open(model, fields)
        self._fresh = False
        manifest, outputs = model.manifest, self.stream.options.outputs
        return steps.write_opened(model.name, model.version, manifest, self.stream.offset, outputs)

    def _done(self, message: Message) -> None:
        self._fresh = False
        self._engine.metrics.operation(self.stream.model.name, message.operation.name)
        if isinstance(message.operation, Close):
            raise Closing("close")
