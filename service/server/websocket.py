"""A WebSocket connection: a step lane answers simple steps without ASGI messages, and uvicorn's protocol all else."""

import asyncio
import logging
import struct
from collections.abc import Callable
from contextvars import Context, copy_context
from copy import copy
from enum import Enum
from functools import partial
from time import perf_counter
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from preblock.service.api.http.routes.decode import STEP_CONNECTION, TOO_BIG
from preblock.service.api.http.streaming import DecodeSession
from preblock.service.api.streams import StreamLifetime
from preblock.service.core.large_bodies import LARGE_BODY_BYTES, IncomingBody, IncomingMemory
from preblock.service.engine.fast_path import FastRun
from preblock.service.observability.context import CURRENT_REQUEST, RequestContext
from preblock.service.server.incoming_request import Refusal
from preblock.service.server.lingering_close import LingeringClose
from preblock.service.server.read_scheduler import ReadScheduler
from preblock.service.server.unread_watch import UnreadWatch
from preblock.service.server.uvicorn_bridge import Client, InnerTransport, Shared, WebSocketsSansIOProtocol
from preblock.service.server.websocket_frames import FrameReader, binary_head, binary_payload

LOG = logging.getLogger(__name__)
TRY_AGAIN_LATER = 1013
"""Close code of a server without room for a message (the registry of RFC 6455)."""
MAX_FRAGMENTS = 2**14
"""Frames of one message: a list of empty frames takes many times their bytes."""
CLOSE_FRAME = 0x88


class StepLane:
    """Answers simple steps of one session, each in the event-loop iteration after its arrival.

    Args:
        transport: of the WebSocket.
        loop: of the WebSocket.
        resume: called after a response, to resume reading.
        writable: set unless the client does not read.
        fail: handles an unexpected exception of a step.

    Attributes:
        busy: whether a step is being answered; no message may overtake it.

    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        resume: Callable[[], None],
        writable: asyncio.Event,
        fail: Callable[[], None],
    ) -> None:
        self._transport, self._loop, self._resume, self._fail = transport, loop, resume, fail
        self._writable = writable
        self._session: DecodeSession | None = None
        self._lifetime: StreamLifetime | None = None
        self._context = Context()
        self.busy = False

    def listen(self, session: DecodeSession | None, lifetime: StreamLifetime) -> None:
        """Answer simple steps of `session` for the current caller; with None, leave them to the application."""
        self._session, self._lifetime = session, lifetime
        self._context = copy_context()

    @property
    def request(self) -> RequestContext | None:
        """The request of the stream; None before its first message."""
        return self._context.get(CURRENT_REQUEST)

    @property
    def held(self) -> int:
        """Bytes of memory that the response in progress holds."""
        return 0 if (request := self.request) is None else request.held

    async def drain(self) -> None:
        """Wait until the client has read the answers."""
        await self._writable.wait()

    def release(self) -> None:
        """Release the memory of the answered steps, because the client has read them."""
        if self._session is not None and self._session.context is not None and not self.busy:
            self._session.context.release()

    def end(self) -> None:
        """Answer no step any more, because the connection is closing."""
        self._session = None

    def begin(self, data: bytes) -> bool:
        """Start to answer `data` if it is exactly one simple step; return whether it is."""
        session, lifetime = self._session, self._lifetime
        if session is None or lifetime is None:
            return False
        payload = binary_payload(data)
        if payload is None or not lifetime.touch():
            return False
        run = self._context.run(session.begin, payload)
        if run is not None:
            self.busy = True
            self._loop.call_soon(self._finish, session, run)
        return run is not None

    def _finish(self, session: DecodeSession, run: FastRun) -> None:
        """Write the response, unless the stream has ended."""
        self.busy = False
        try:
            parts = session.finish(run)
            size, began = 0, perf_counter()
            if self._session is session and not self._transport.is_closing():
                size = sum(map(len, parts))
                self._transport.write(b"".join((binary_head(size), *parts)))
            session.end(run, size, perf_counter() - began)
            if self._writable.is_set():
                self.release()
            self._resume()
        except Exception as error:
            run.end(error)
            self._fail()


class MessageMemory:
    """Counts the bytes of large messages: of one that arrives, and of one that the application answers.

    Args:
        memory: bounds the bytes of all connections.
        update: called when the connection may read on, or must stop.
        refuse: closes the connection, whose message takes too long.

    """

    def __init__(self, memory: IncomingMemory, update: Callable[[], None], refuse: Callable[[], None]) -> None:
        self._memory, self._update, self._refuse = memory, update, refuse
        self._arriving: IncomingBody | None = None
        self._complete: IncomingBody | None = None
        self._receives = 0  # calls of `receive` until the complete message is answered
        self._receiving = False

    @property
    def paused(self) -> bool:
        """Whether no further bytes may be read."""
        return self._complete is not None or (self._arriving is not None and self._arriving.paused)

    def count(self, received: int, queued: int) -> None:
        """Count the bytes of the message that arrives; a complete large one keeps them until it is answered.

        Args:
            received: payload bytes of the incomplete message.
            queued: messages that the application has not taken.

        """
        arriving = self._arriving
        if arriving is not None and received < arriving.size:
            arriving.complete()
            self._arriving, self._complete = None, arriving
            self._receives = queued + (not self._receiving)
            if not queued:  # the application has ended, and takes no message
                self.end_message()
            self._update()
        elif received >= LARGE_BODY_BYTES:
            if arriving is None:
                arriving = self._arriving = IncomingBody(self._memory, self._update, self._refuse)
            if not arriving.grow(received):
                self._update()

    async def receive(self, receive: Receive) -> Message:
        """Receive the next message; it answers the one before."""
        self._receives -= 1
        if self._complete is not None and self._receives <= 0:
            self.end_message()
        self._receiving = True
        try:
            return await receive()
        finally:
            self._receiving = False

    def answer(self) -> None:
        """Release the memory of the message that the application answers; the client may read late."""
        if self._complete is not None and self._receives <= 1:
            self.end_message()

    def end_message(self) -> None:
        """Release the memory of an answered message, and read on."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete.end()
            self._update()

    def end(self) -> None:
        """Release all memory."""
        self.end_message()
        if self._arriving is not None:
            self._arriving.end()


class Stage(Enum):
    """The stages of a WebSocket. A refused one stays in the first."""

    OPENING = 1
    ACCEPTED = 2
    ENDED = 3


class WebSocket(asyncio.Protocol):
    """Reads at the pace of the client, and buffers at most one chunk of input beside one message.

    Args:
        shared: what the connections of the server share.
        client: of the connection.

    """

    def __init__(self, shared: Shared, client: Client) -> None:
        self._shared, self._client, transport, loop = shared, client, client.transport, shared.loop
        self._frames = frames = FrameReader(shared.config.ws_max_size)
        self._scheduler = ReadScheduler(transport, shared.turns, self._read, lambda: frames.received, self._fail)
        self._writable = asyncio.Event()
        self._writable.set()
        self._steps = StepLane(transport, loop, self._update_reading, self._writable, self._fail)
        self._watch = UnreadWatch(transport, loop, shared.services, lambda: self._steps.held)
        self._stage = Stage.OPENING
        self._closing = self._inner_paused = False
        refuse = partial(self._close_with, TRY_AGAIN_LATER, b"the message came too slowly while others waited")
        self._messages = MessageMemory(shared.services.limits.incoming, self._update_reading, refuse)
        config, state = copy(shared.config), copy(shared.server_state)
        config.loaded_app = self._serve
        state.connections = set()  # else the server would shut it down before the close message
        self._inner = WebSocketsSansIOProtocol(config, state, shared.app_state, loop)

    def open(self, head: bytes, rest: bytes) -> None:
        """Answer the upgrade request; `rest` is the input after its head."""
        transport, tasks = self._client.transport, self._shared.tasks
        self._shared.connections.add(self)
        transport.set_protocol(self)
        callbacks = self._close, self._is_closing, self._pause_reading, self._resume_reading
        self._inner.connection_made(InnerTransport(transport, *callbacks))
        count, context = len(tasks), self._client.context.copy()
        context.run(STEP_CONNECTION.set, self._steps)
        context.run(self._inner.data_received, head)
        if len(tasks) == count and not self._is_closing():
            transport.write(_handshake_error(head).response(()))
            self._close()
        else:
            self._scheduler.pause()  # frames before the handshake response wait for it
            self._scheduler.feed(rest)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and record whether it accepts the WebSocket."""

        async def send_and_record(message: Message) -> None:
            if message["type"] == "websocket.send":
                self._messages.answer()
            await send(message)
            if message["type"] == "websocket.accept":
                self._stage = Stage.ACCEPTED
                self._update_reading()

        app: Any = self._shared.config.loaded_app
        try:
            await app(scope, partial(self._messages.receive, receive), send_and_record)
        except asyncio.CancelledError:  # by the end of the server; uvicorn would log an error
            self._client.transport.abort()
        finally:
            if self._stage == Stage.ACCEPTED:
                self._stage = Stage.ENDED
            self._messages.end_message()

    def _is_closing(self) -> bool:
        return self._closing or self._client.transport.is_closing()

    def _close(self) -> None:
        """Close the connection after the frames written so far; the client may still be sending a message."""
        if not self._is_closing():
            self._closing = True
            ended = self._inner.conn.close_rcvd is not None
            LingeringClose(self._client.transport, self._shared.loop, self._shared.connections, ended)
            self.connection_lost(None)

    def _fail(self) -> None:
        """Log the current exception, and reset the connection."""
        context = self._steps.request
        request_id = "" if context is None else context.text
        LOG.exception("internal error in a WebSocket; the connection is closed", extra={"request_id": request_id})
        self._client.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the application of the disconnect."""
        self._shared.connections.discard(self)
        self._steps.end()
        self._writable.set()
        self._watch.stop()
        self._scheduler.end()
        self._inner.connection_lost(exc)
        self._messages.end()

    def shutdown(self) -> None:
        """Let an open stream send its close message; close any other WebSocket."""
        streams = self._shared.services.streams
        if self._stage == Stage.ACCEPTED and streams is not None:
            streams.drain()
        else:
            self._inner.shutdown()

    def data_received(self, data: bytes) -> None:
        """Read frames, after the response to a step in progress."""
        if self._steps.busy:
            self._scheduler.pause()
        self._scheduler.feed(data)

    def _read(self, data: bytes) -> None:
        simple = not self._scheduler.rest and self._writable.is_set() and self._frames.between_messages
        if simple and self._steps.begin(data):
            return
        data = self._frames.feed(data)
        if self._frames.fragments > MAX_FRAGMENTS:
            self._close_with(TOO_BIG)
        else:
            self._inner.data_received(data)
            if not self._is_closing():
                self._messages.count(self._frames.received, self._inner.queue.qsize())

    def _close_with(self, code: int, reason: bytes = b"") -> None:
        self._client.transport.write(struct.pack("!BBH", CLOSE_FRAME, 2 + len(reason), code) + reason)
        self._close()

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read: each ping would add a response."""
        self._writable.clear()
        self._watch.start()
        self._inner.pause_writing()
        self._update_reading()

    def resume_writing(self) -> None:
        """Resume reading."""
        self._writable.set()
        self._watch.stop()
        self._steps.release()
        self._inner.resume_writing()
        self._update_reading()

    def _update_reading(self) -> None:
        """Read only after the handshake, while client and application read, and memory for large messages is free."""
        waits = self._inner_paused or not self._writable.is_set() or self._steps.busy
        if self._stage == Stage.OPENING or waits or self._messages.paused:
            self._scheduler.pause()
        else:
            self._scheduler.resume()

    def _pause_reading(self) -> None:
        """Stop reading, because the application has not taken the last message."""
        self._inner_paused = True
        self._update_reading()

    def _resume_reading(self) -> None:
        self._inner_paused = False
        self._update_reading()


def _handshake_error(head: bytes) -> Refusal:
    """Return the refusal of a request head that `websockets` rejected without a response."""
    line, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if len(line) > MAX_LINE_LENGTH:
        return Refusal(414, f"the URL of a WebSocket has at most {MAX_LINE_LENGTH} bytes")
    if len(headers) > MAX_NUM_HEADERS or any(len(header) > MAX_LINE_LENGTH for header in headers):
        limits = f"{MAX_NUM_HEADERS} headers of {MAX_LINE_LENGTH} bytes"
        return Refusal(431, f"the request of a WebSocket has at most {limits}")
    return Refusal(400, "the request does not open a WebSocket: it is no valid handshake")
