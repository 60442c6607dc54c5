"""Hands requests to an unmodified HTTP protocol of uvicorn, through the public interface of asyncio.

The first such request creates the contained protocol; most connections for tensors need none.
"""

from copy import copy
from typing import TYPE_CHECKING

from starlette.types import Message, Receive, Scope, Send

from preblock.service.api.http.dispatcher import held_by
from preblock.service.api.streams import LIFETIME
from preblock.service.server.incoming_request import MAX_IDLE_HEAD_BYTES, IncomingRequest
from preblock.service.server.inner_transport import InnerTransport
from preblock.service.server.uvicorn_adapter import HttpToolsProtocol, write_without_chunks

if TYPE_CHECKING:
    from preblock.service.server.front import Front


class Handover:
    """The contained protocol and its current request.

    Args:
        connection: of the client.

    """

    def __init__(self, connection: "Front") -> None:
        self._connection = connection
        self._inner: HttpToolsProtocol | None = None
        self._scope: Scope = {}
        self._answering: IncomingRequest | None = None

    def _protocol(self) -> HttpToolsProtocol:
        if self._inner is None:
            connection = self._connection
            config = copy(connection.config)
            config.loaded_app = self._serve
            state = connection.server_state, connection.app_state, connection.loop
            self._inner = HttpToolsProtocol(config, *state)
            callbacks = self._close, connection.is_closing, connection.scheduler.pause, connection.resume_reading
            self._inner.connection_made(InnerTransport(connection.transport, *callbacks))
        return self._inner

    @property
    def held(self) -> int:
        """Bytes of memory that the response in progress holds."""
        return held_by(self._scope)

    def _close(self) -> None:
        """Close the connection during a response; between responses the connection decides."""
        if self._answering is not None:
            self._connection.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and notify the connection when the response is complete.

        After an exception the contained protocol closes the connection itself.
        """
        incoming = self._connection.active
        assert incoming is not None
        self._scope = scope
        body_ended = disconnected = ends_by_close = False

        async def receive_body() -> Message:
            """Receive a chunk of the body. After the last chunk before malformed input, report a disconnect."""
            nonlocal body_ended, disconnected
            if not body_ended:
                message = await receive()
                if incoming.refusal is None or message.get("more_body"):
                    return message
                body_ended = True
                if message.get("body"):
                    return {**message, "more_body": True}
            disconnected = True
            if self._inner is not None:
                self._inner.connection_lost(ConnectionAbortedError())  # it drops the rest of the response
            return await receive()

        async def send_and_record(message: Message) -> None:
            """Send a message. HTTP/1.0 has no chunks: there the close ends a response of unknown length."""
            nonlocal ends_by_close
            incoming.answer_begun = incoming.answer_begun or not disconnected
            if message["type"] == "http.response.start":
                ends_by_close = not incoming.knows_chunks and b"content-length" not in dict(message["headers"])
            if ends_by_close and self._inner is not None:
                write_without_chunks(self._inner, len(message.get("body", b"")))
            await send(message)

        await self._connection.config.loaded_app(scope, receive_body, send_and_record)
        self._connection.loop.call_soon(self._finish, incoming)

    def _finish(self, incoming: IncomingRequest) -> None:
        self._scope, self._answering = {}, None
        if incoming.complete:
            self._forget(incoming)
        if incoming is self._connection.active:
            self._connection.finish()

    def _forget(self, incoming: IncomingRequest) -> None:
        """Drop the contained protocol after a long head, which it would keep. A new one would misread a body's rest."""
        if incoming.head_size > MAX_IDLE_HEAD_BYTES and self._inner is not None:
            self._inner.connection_lost(None)
            self._inner = None

    def begin(self, incoming: IncomingRequest) -> None:
        """Forward a request with the body received so far."""
        self._answering = incoming
        self._protocol().data_received(incoming.head())
        chunks, incoming.chunks = incoming.chunks, []
        for chunk in chunks:
            self.send_body(incoming, chunk)
        if incoming.complete or incoming.refusal is not None:
            self.send_end(incoming)

    def send_body(self, incoming: IncomingRequest, body: bytes) -> None:
        """Forward a chunk of the request body."""
        self._protocol().data_received(b"%x\r\n%b\r\n" % (len(body), body) if incoming.transfer_encodings else body)

    def send_end(self, incoming: IncomingRequest) -> None:
        """Forward the end of the request body, even before the end of a malformed one."""
        if incoming.transfer_encodings:
            self._protocol().data_received(b"0\r\n\r\n")
        if incoming.answered:
            self._forget(incoming)

    def cut_body(self, incoming: IncomingRequest) -> None:
        """End the request body early: chunks by a last one, a body of known length by a disconnect."""
        if incoming.transfer_encodings:
            self.send_end(incoming)
        elif self._inner is not None:
            self._inner.connection_lost(ConnectionAbortedError())

    def connection_lost(self) -> None:
        """Notify the application and its open stream of the client's disconnect."""
        if self._inner is not None:
            self._inner.connection_lost(None)  # with an exception, its keep-alive timer would hold the request
        if (lifetime := self._scope.get("state", {}).get(LIFETIME)) is not None:
            lifetime.end("left")

    def pause_writing(self) -> None:
        """Pause the response, because the client does not read."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Resume the response."""
        if self._inner is not None:
            self._inner.resume_writing()
