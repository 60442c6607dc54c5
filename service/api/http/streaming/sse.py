"""Decoding over HTTP: the vectors of a known list of ids, as server-sent events."""

import asyncio
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from preblock.service.api.http import errors
from preblock.service.api.http.body import read_body
from preblock.service.api.http.negotiation import EVENTS
from preblock.service.api.http.request import RawRequest
from preblock.service.api.http.streaming.ndjson import FAREWELL_SECONDS, HEADERS
from preblock.service.api.streams import StreamEnd, StreamLifetime, StreamRegistry
from preblock.service.codecs import decode_json
from preblock.service.codecs.native_json import read_json
from preblock.service.core.decode_ops import DecodeMessage as Told
from preblock.service.core.errors import Invalid, PreblockError
from preblock.service.engine.decode_stream import DecodeState, split_step
from preblock.service.engine.engine import Engine
from preblock.service.runtime.model import TokenModel


async def open_events(
    engine: Engine,
    streams: StreamRegistry,
    model: TokenModel,
    request: Request,
    query: dict[str, Any],
    max_body_bytes: int,
) -> "EventStream":
    """Read the list of ids, and return its events; the first is ready, so that its error still has a status.

    Raises:
        ClientFault: the request, or its first chunk, is not allowed.

    """
    body = await read_body(RawRequest.of(request), engine, max_body_bytes)
    feed = await engine.scheduler.run(len(body), lambda: _read(body, query, model), text=True)
    chunks = EventChunks(engine, DecodeState(engine, model, feed.options), feed)
    return EventStream(streams, chunks, await chunks.next())


def _read(body: bytes, query: dict[str, Any], model: TokenModel) -> decode_json.Feed:
    document = read_json(body)
    for name in query:
        if name in document:
            raise Invalid(name, "one in the query and one in the body", "one of them")
    return decode_json.read_feed({**query, **document}, model.manifest.indices)


class EventChunks:
    """A list of ids, fed to a stream chunk by chunk.

    Args:
        engine: counts, and writes large events in a thread.
        stream: receives the ids.
        feed: the ids.

    """

    def __init__(self, engine: Engine, stream: DecodeState, feed: decode_json.Feed) -> None:
        self._engine, self.stream, self._encoding = engine, stream, feed.encoding
        self.begin = stream.offset
        self._steps = split_step(feed.step, feed.chunk)
        self._fed = 0

    async def next(self) -> bytes | None:
        """Feed the next chunk and return the event of its vectors; its id counts the tokens of the longest row.

        None at the end.

        Raises:
            ClientFault: it is not allowed.

        """
        engine, stream, step = self._engine, self.stream, next(self._steps, None)
        if step is None:
            return None
        # No limit holds, because the client has asked once for all of them.
        with engine.admission.request("decode", limited=False) as record, stream.attempt():
            record.model, record.operation = stream.model.name, step.name
            answer = await stream.do(Told(step), record)
            assert answer is not None
            written = await engine.scheduler.run(
                answer.size, lambda: decode_json.write_answer(answer, self._encoding, 0), text=self._encoding == "float"
            )
        self._fed += int(answer.lengths.max())
        return b"id: %d\ndata: %b\n\n" % (self._fed, written)


class EventStream(Response):
    """Sends the vectors of each chunk when they are ready.

    Args:
        streams: the open ones.
        chunks: of ids.
        first: the event of the first.

    """

    def __init__(self, streams: StreamRegistry, chunks: EventChunks, first: bytes | None) -> None:
        super().__init__(media_type=EVENTS, headers=HEADERS)
        del self.headers["Content-Length"]
        self._streams, self._chunks, self._first = streams, chunks, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as ASGI has it
        """Send event after event, until all are sent or the client leaves.

        Raises:
            Unavailable: too many streams are open.

        """
        with self._streams.open() as lifetime:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            left = asyncio.ensure_future(receive())
            try:
                last = await self._send_all(lifetime, send, left)
            finally:
                left.cancel()
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await send(_body(last, more=False))
        except TimeoutError:  # the client does not read
            return

    async def _send_all(self, lifetime: StreamLifetime, send: Send, left: "asyncio.Future[Message]") -> bytes:
        """Send all events but the last, and return the last."""
        event, told = self._first, self._chunks.begin
        try:
            while event is not None and not left.done():
                await lifetime.wait(partial(send, _body(event)))
                told = self._chunks.stream.offset
                # Sending lets nobody else run while the client keeps up.
                await asyncio.sleep(0)
                event = await self._chunks.next()
            return b"event: end\ndata: %b\n\n" % decode_json.write_state(self._chunks.stream.offset)
        except PreblockError as error:
            return b"event: error\ndata: %b\n\n" % decode_json.write_error(errors.problem(error))
        except StreamEnd as closing:
            # An event that was not sent has fed nothing.
            state = decode_json.write_state(told, closing=closing.reason)
            return b"event: closing\ndata: %b\n\n" % state


def _body(content: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
