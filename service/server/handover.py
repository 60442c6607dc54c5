"""Hands requests to a contained, unmodified protocol of uvicorn, through the public interface of asyncio.

It is made with the first such request; most connections for tensors need none.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from copy import copy
from typing import TYPE_CHECKING, Any

from preblock.service.api.streams import LIFETIME
from preblock.service.server.incoming_request import IncomingRequest
from preblock.service.server.inner_transport import InnerTransport
from preblock.service.server.uvicorn_adapter import HttpToolsProtocol

if TYPE_CHECKING:
    from preblock.service.server.front import Front

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
TRANSFER_ENCODING = b"transfer-encoding"


class Handover:
    """The contained protocol, and its request.

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
            self._inner.connection_made(InnerTransport(self))
        return self._inner

    async def _serve(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Run the application, and tell the connection when the answer is complete.

        After an exception the contained protocol closes the connection itself.
        """
        incoming = self._connection.active
        self._scope = scope

        async def send_and_note(message: Message) -> None:
            if incoming is not None:
                incoming.answer_begun = True
            await send(message)

        await self._connection.config.loaded_app(scope, receive, send_and_note)
        self._connection.loop.call_soon(self._finish, incoming)

    def _finish(self, incoming: IncomingRequest | None) -> None:
        self._scope, self._answering = {}, None
        if incoming is not None and incoming is self._connection.active:
            self._connection.finish()

    def begin(self, incoming: IncomingRequest) -> None:
        """Hand on a request, and as much of its body as is there."""
        inner, self._answering = self._protocol(), incoming
        incoming.chunked = any(name.lower() == TRANSFER_ENCODING for name, _ in incoming.headers)
        inner.data_received(incoming.head())
        parts, incoming.parts = incoming.parts, []
        for part in parts:
            self.send_body(incoming, part)
        if incoming.complete:
            self.send_end(incoming)

    def send_body(self, incoming: IncomingRequest, body: bytes) -> None:
        """Hand on a part of the body of the request."""
        self._protocol().data_received(b"%x\r\n%b\r\n" % (len(body), body) if incoming.chunked else body)

    def send_end(self, incoming: IncomingRequest) -> None:
        """Hand on the end of the body of the request."""
        if incoming.chunked:
            self._protocol().data_received(b"0\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application and the open stream that the client has left."""
        if self._inner is not None:
            self._inner.connection_lost(exc)
        if (lifetime := self._scope.get("state", {}).get(LIFETIME)) is not None:
            lifetime.end("left")

    def pause_writing(self) -> None:
        """Let the answer wait, because the client does not read."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Let the answer go on."""
        if self._inner is not None:
            self._inner.resume_writing()

    # The owner of the contained protocol's transport.

    @property
    def transport(self) -> asyncio.Transport:
        """The transport of the connection."""
        return self._connection.transport

    def close(self) -> None:
        """Close the connection, if the contained protocol answers; between answers the connection decides."""
        if self._answering is not None:
            self._connection.transport.close()

    def pause_reading(self) -> None:
        """Read nothing more, because the application is slower than the client."""
        self._connection.scheduler.pause()

    def resume_reading(self) -> None:
        """Read on."""
        self._connection.resume_reading()
