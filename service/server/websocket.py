"""A WebSocket connection: a step lane answers simple steps, and uvicorn's protocol all other frames."""

import asyncio
import logging
import struct
from copy import copy
from functools import partial
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from preblock.service.api.http.dispatcher import held_by
from preblock.service.api.http.routes.decode import CONNECTION, TOO_BIG
from preblock.service.core.body_memory import LARGE_BODY_BYTES
from preblock.service.core.incoming_memory import IncomingBody, IncomingMemory
from preblock.service.server.incoming_request import Refusal
from preblock.service.server.lingering_close import LingeringClose
from preblock.service.server.read_scheduler import ReadScheduler, ReadTurns
from preblock.service.server.step_lane import StepLane
from preblock.service.server.tensor_responder import error_response
from preblock.service.server.unread_watch import UnreadWatch
from preblock.service.server.uvicorn_bridge import (
    Config,
    InnerTransport,
    ServerState,
    WebSocketsSansIOProtocol,
    connections_of,
)
from preblock.service.server.websocket_frames import FrameReader

LOG = logging.getLogger(__name__)
TRY_AGAIN_LATER = 1013
"""Close code of a server without room for a message (the registry of RFC 6455)."""
MAX_FRAGMENTS = 2**14
"""Frames of one message: a list of empty frames takes many times their bytes."""
CLOSE_FRAME = 0x88


class WebSocket(asyncio.Protocol):
    """Reads at the pace of the client, and buffers at most one chunk of input beside one message.

    Args:
        transport: of the connection.
        config: of the server, loaded.
        server_state: of the server.
        app_state: of the application; its `streams`, if any, close the connection at shutdown, and its `incoming`
            bounds the memory of large messages.
        loop: of the connection.

    """

    def __init__(
        self,
        transport: asyncio.Transport,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.transport = transport
        self._app, self._streams = config.loaded_app, app_state.get("streams")
        self._incoming: IncomingMemory | None = app_state.get("incoming")
        self._arriving: IncomingBody | None = None  # the large message that arrives
        self._complete: IncomingBody | None = None  # the large message that the application answers
        self._receives = 0  # calls of `receive` until it is answered
        self._receiving = False
        self._tasks, self._connections = server_state.tasks, connections_of(server_state)
        self._frames = frames = FrameReader(config.ws_max_size)
        turns = ReadTurns.of(app_state, loop)
        self._scheduler = ReadScheduler(transport, turns, self._read, lambda: frames.received, self._fail)
        self._writable = asyncio.Event()
        self._writable.set()
        self._steps = StepLane(transport, loop, self._update_reading, self._writable, self._fail)
        self._loop = loop
        self._scope: Scope = {}
        self._watch = UnreadWatch(transport, loop, app_state, lambda: held_by(self._scope))
        self._accepted = self._ended = self._closing = False
        self._inner_paused = self._write_paused = False
        config, own_state = copy(config), copy(server_state)
        config.loaded_app = self._serve
        own_state.connections = set()  # else the server would shut it down before the close message
        self._inner = WebSocketsSansIOProtocol(config, own_state, {**app_state, CONNECTION: self._steps}, loop)

    def open(self, head: bytes, rest: bytes) -> None:
        """Answer the upgrade request; `rest` is the input after its head."""
        self._connections.add(self)
        self.transport.set_protocol(self)
        callbacks = self._close, self._is_closing, self._pause_reading, self._resume_reading
        self._inner.connection_made(InnerTransport(self.transport, *callbacks))
        tasks = len(self._tasks)
        self._inner.data_received(head)
        if len(self._tasks) == tasks and not self._is_closing():
            self.transport.write(error_response(_handshake_error(head), ()))
            self._close()
        else:
            self._scheduler.pause()  # frames before the handshake response wait for it
            self._scheduler.feed(rest)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and record whether it accepts the WebSocket."""
        self._scope = scope

        async def receive_next() -> Message:
            self._receives -= 1
            if self._complete is not None and self._receives <= 0:
                self._end_message()
            self._receiving = True
            try:
                return await receive()
            finally:
                self._receiving = False

        async def send_and_record(message: Message) -> None:
            if self._complete is not None and self._receives <= 1 and message["type"] == "websocket.send":
                self._end_message()  # it is answered; the client may read late
            await send(message)
            if message["type"] == "websocket.accept":
                self._accepted = True
                self._update_reading()

        try:
            await self._app(scope, receive_next, send_and_record)
        finally:
            self._ended = True
            self._end_message()

    def _is_closing(self) -> bool:
        return self._closing or self.transport.is_closing()

    def _close(self) -> None:
        """Close the connection after the frames written so far; the client may still be sending a message."""
        if not self._is_closing():
            self._closing = True
            ended = self._inner.conn.close_rcvd is not None
            LingeringClose(self.transport, self._loop, self._connections, ended)
            self.connection_lost(None)

    def _fail(self) -> None:
        """Log the current exception, and reset the connection."""
        context = self._steps.request
        request_id = "" if context is None else context.text
        LOG.exception("internal error in a WebSocket; the connection is closed", extra={"request_id": request_id})
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the application of the disconnect."""
        self._connections.discard(self)
        self._steps.end()
        self._writable.set()
        self._watch.stop()
        self._scheduler.end()
        self._inner.connection_lost(exc)
        self._end_message()
        if self._arriving is not None:
            self._arriving.end()

    def shutdown(self) -> None:
        """Let an open stream send its close message; close any other WebSocket."""
        if self._accepted and not self._ended and self._streams is not None:
            self._streams.drain()
        else:
            self._inner.shutdown()

    def data_received(self, data: bytes) -> None:
        """Read frames, after the response to a step in progress."""
        if self._steps.busy:
            self._scheduler.pause()
        self._scheduler.feed(data)

    def _read(self, data: bytes) -> None:
        simple = not self._scheduler.rest and not self._write_paused and self._frames.between_messages
        if simple and self._steps.begin(data):
            return
        data = self._frames.feed(data)
        if self._frames.fragments > MAX_FRAGMENTS:
            self._close_with(TOO_BIG)
        else:
            self._inner.data_received(data)
            if self._incoming is not None and not self._is_closing():
                self._count_message(self._incoming)

    def _close_with(self, code: int, reason: bytes = b"") -> None:
        self.transport.write(struct.pack("!BBH", CLOSE_FRAME, 2 + len(reason), code) + reason)
        self._close()

    def _count_message(self, memory: IncomingMemory) -> None:
        """Count the bytes of the message that arrives; a complete large one keeps them until it is answered."""
        received, arriving = self._frames.received, self._arriving
        if arriving is not None and received < arriving.size:
            arriving.complete()
            self._arriving, self._complete = None, arriving
            self._receives = self._inner.queue.qsize() + (not self._receiving)
            if not self._inner.queue.qsize():  # the application has ended, and takes no message
                self._end_message()
            self._update_reading()
        elif received >= LARGE_BODY_BYTES:
            if arriving is None:
                refuse = partial(self._close_with, TRY_AGAIN_LATER, b"the message came too slowly while others waited")
                arriving = self._arriving = IncomingBody(memory, self._update_reading, refuse)
            if not arriving.grow(received):
                self._update_reading()

    def _end_message(self) -> None:
        """Release the memory of an answered message, and read on."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete.end()
            self._update_reading()

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read: each ping would add a response."""
        self._write_paused = True
        self._writable.clear()
        self._watch.start()
        self._inner.pause_writing()
        self._update_reading()

    def resume_writing(self) -> None:
        """Resume reading."""
        self._write_paused = False
        self._writable.set()
        self._watch.stop()
        self._steps.release()
        self._inner.resume_writing()
        self._update_reading()

    def _update_reading(self) -> None:
        """Read only after the handshake, while client and application read, and memory for large messages is free."""
        memory_paused = self._complete is not None or (self._arriving is not None and self._arriving.paused)
        if not self._accepted or self._inner_paused or self._write_paused or self._steps.busy or memory_paused:
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
