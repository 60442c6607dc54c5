"""A WebSocket: an unmodified protocol of uvicorn speaks it, and a step lane answers simple steps before it."""

import asyncio
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from copy import copy
from typing import Any

from preblock.service.api.http.routes.decode import CONNECTION
from preblock.service.server.inner_transport import InnerTransport
from preblock.service.server.read_scheduler import ReadScheduler
from preblock.service.server.step_lane import StepLane
from preblock.service.server.tensor_responder import refusal
from preblock.service.server.uvicorn_adapter import Config, ServerState, WebSocketsSansIOProtocol, connections_of
from preblock.service.server.websocket_frames import FrameTracker

MAX_FRAGMENTS = 2**14
"""Frames of one message; a list of empty ones would take many times their bytes."""
CLOSE_FRAME = 0x88
TOO_BIG = 1009
"""Close code of a message that is too large to process (RFC 6455, section 7.4.1)."""
Message = MutableMapping[str, Any]


class WebSocket(asyncio.Protocol):
    """Reads no faster than the client reads, and keeps no more than one chunk of input beside one message.

    Args:
        transport: of the connection.
        config: of the server, loaded.
        server_state: of the server.
        app_state: of the application; its `streams` close the connection at the end of the service.
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
        self._app, self._streams = config.loaded_app, app_state["streams"]
        self._tasks, self._connections = server_state.tasks, connections_of(server_state)
        self._scheduler = ReadScheduler(transport, loop, self._read)
        self._steps = StepLane(transport, loop, self._settle)
        self._frames = FrameTracker()
        self._accepted = self._ended = False
        self._inner_paused = self._write_paused = False
        config, own_state = copy(config), copy(server_state)
        config.loaded_app = self._serve
        own_state.connections = set()  # the server would shut a listed protocol down without its offsets
        self._inner = WebSocketsSansIOProtocol(config, own_state, {**app_state, CONNECTION: self._steps}, loop)

    def open(self, head: bytes, rest: bytes) -> None:
        """Answer the request for a WebSocket; `rest` is the input after its head."""
        self._connections.add(self)
        self.transport.set_protocol(self)
        self._inner.connection_made(InnerTransport(self))
        tasks = len(self._tasks)
        self._inner.data_received(head)
        if len(self._tasks) == tasks and not self.transport.is_closing():
            self.transport.write(refusal(400, "the request opens no WebSocket", ()))
            self.transport.close()
        elif rest:
            self.data_received(rest)

    async def _serve(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Run the application, and note whether it accepts the WebSocket."""

        async def send_and_note(message: Message) -> None:
            self._accepted = self._accepted or message["type"] == "websocket.accept"
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that the client has left."""
        self._connections.discard(self)
        self._scheduler.end()
        self._inner.connection_lost(exc)

    def shutdown(self) -> None:
        """Let an open stream send its offsets and close; close any other WebSocket."""
        if self._accepted and not self._ended:
            self._streams.drain()
        else:
            self._inner.shutdown()

    def data_received(self, data: bytes) -> None:
        """Read frames; none overtakes a step that is being answered."""
        if self._steps.busy:
            self._scheduler.pause()
        self._scheduler.feed(data)

    def _read(self, data: bytes) -> None:
        simple = not self._scheduler.rest and not self._write_paused and self._frames.between_messages
        if simple and self._steps.begin(data):
            return
        self._frames.feed(data)
        if self._frames.fragments > MAX_FRAGMENTS:
            self.transport.write(struct.pack("!BBH", CLOSE_FRAME, 2, TOO_BIG))
            self.transport.close()
        else:
            self._inner.data_received(data)

    def pause_writing(self) -> None:
        """Read nothing from a client that does not read: each ping would be answered."""
        self._write_paused = True
        self._inner.pause_writing()
        self._settle()

    def resume_writing(self) -> None:
        """Read again."""
        self._write_paused = False
        self._inner.resume_writing()
        self._settle()

    def _settle(self) -> None:
        """Read while the client reads, the application waits, and no step is being answered."""
        if self._inner_paused or self._write_paused or self._steps.busy:
            self._scheduler.pause()
        else:
            self._scheduler.resume()

    # The owner of the contained protocol's transport.

    def close(self) -> None:
        """Close the connection."""
        self.transport.close()

    def pause_reading(self) -> None:
        """Read nothing more, because the application has not taken the last message."""
        self._inner_paused = True
        self._settle()

    def resume_reading(self) -> None:
        """Read on."""
        self._inner_paused = False
        self._settle()
