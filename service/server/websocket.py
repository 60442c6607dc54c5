"""A WebSocket of the application, spoken through the sans-I/O protocol of `websockets`."""

import asyncio
import logging
from http import HTTPStatus
from typing import Any, cast

from websockets.datastructures import Headers
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from preblock.service.api.http.routes.decode import CONNECTION
from preblock.service.server.keepalive import KeepAlive
from preblock.service.server.read_scheduler import ReadScheduler
from preblock.service.server.step_lane import StepLane
from preblock.service.server.tensor_responder import STATUS_LINES
from preblock.service.server.uvicorn_adapter import Config, ServerState, connections_of
from preblock.service.server.websocket_messages import MessageBuffer, denial, frame_size, scope_of

LOG = logging.getLogger(__name__)
CLOSE_TIMEOUT_SECONDS = 10.0
"""A client may take so long to answer a close message."""
Message = dict[str, Any]


class ClientGone(OSError):
    """The application sends to a client that has left."""


class WebSocket(asyncio.Protocol):
    """Keeps no more of its client than one message, and reads no faster than the client reads.

    Args:
        config: of the server, loaded.
        server_state: of the server.
        app_state: of the application; its `streams` close the connection at the end of the service.
        loop: of the connection.

    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._config, self._server_state, self._app_state, self._loop = config, server_state, app_state, loop
        self._connections = connections_of(server_state)
        self._conn = ServerProtocol(max_size=config.ws_max_size, logger=LOG)
        self._keep_alive = KeepAlive(config, loop, self._conn, self._write, self.fail)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._scheduler: ReadScheduler = None  # type: ignore[assignment]
        self._steps: StepLane = None  # type: ignore[assignment]
        self._queue: asyncio.Queue[Message] = asyncio.Queue()
        self._writable = asyncio.Event()
        self._writable.set()
        self._handshake: Response | None = None  # the answer to the request, until the application accepts it
        self._open = False
        self._close_sent = False
        self._lost = False
        self._close_timer: asyncio.TimerHandle | None = None
        self._denial: tuple[int, Headers, bytes] | None = None
        self._partial = 0  # bytes of an incomplete frame
        self._message = MessageBuffer()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the handshake."""
        transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport = transport
        self._scheduler = ReadScheduler(transport, self._loop, self._read)
        self._steps = StepLane(transport, self._loop, self._resume)
        self._connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        """Tell the application that the client has left."""
        self._keep_alive.stop()
        self._queue.put_nowait({"type": "websocket.disconnect", "code": 1005 if self._open else 1006})
        self._connections.discard(self)
        self._scheduler.end()
        self._lost = True
        self._writable.set()
        if self._close_timer is not None:
            self._close_timer.cancel()

    def pause_writing(self) -> None:
        """Take nothing from a client that does not read: each ping would be answered."""
        self._writable.clear()
        self._scheduler.pause()

    def resume_writing(self) -> None:
        """Read on."""
        self._writable.set()
        self._resume()

    def shutdown(self) -> None:
        """Let the streams close their connections; close one without a stream."""
        if self._close_sent:
            self._transport.close()
        elif not self._open:
            self._deny(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._app_state["streams"].drain()

    def open(self, head: bytes) -> None:
        """Answer the request for a WebSocket, or refuse a broken one."""
        self._conn.receive_data(head)
        for event in self._conn.events_received():
            if isinstance(event, Request):
                self._accept(event)
                return
        refused = b"".join(self._conn.data_to_send())
        self._transport.write(refused or STATUS_LINES[400] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Read frames."""
        if self._steps.busy:
            self._scheduler.pause()
        self._scheduler.feed(data)

    def _read(self, data: bytes) -> None:
        if (
            not self._partial
            and self._message.is_empty
            and self._queue.empty()
            and self._writable.is_set()
            and not self._scheduler.rest
            and self._steps.begin(data)
        ):
            return
        self._partial += len(data)
        self._conn.receive_data(data)
        if self._conn.parser_exc is not None:
            self._end_broken()
            return
        for event in self._conn.events_received():
            if isinstance(event, Frame):
                self._partial -= frame_size(len(event.data))
                self._take(event)

    def _take(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PING:
            self._write()  # `websockets` has put the pong there
        elif frame.opcode is Opcode.PONG:
            self._keep_alive.answered(bytes(frame.data))
        elif frame.opcode is Opcode.CLOSE:
            self._take_close()
        elif (message := self._message.add(frame)) is not None:
            self._hand_over(message)

    def _hand_over(self, message: bytes) -> None:
        """Give a message to the application, and read nothing more until it has taken the message."""
        if self._close_sent:  # the application is past its end
            return
        try:
            content: str | bytes = message.decode() if self._message.is_text else message
        except UnicodeDecodeError:
            self._conn.send_close(1007)
            self._end_broken()
            return
        self._queue.put_nowait({"type": "websocket.receive", "text" if self._message.is_text else "bytes": content})
        self._scheduler.pause()

    def _take_close(self) -> None:
        if self._close_sent:  # the client's answer to our close message
            self._transport.close()
        elif not self._transport.is_closing():
            close = self._conn.close_rcvd
            assert close is not None
            self._queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
            self._write()
            self._transport.close()

    def _end_broken(self) -> None:
        """Close the connection with the code for broken input."""
        close = self._conn.close_sent
        code, reason = (1006, "") if close is None else (close.code, close.reason)
        self._queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self._write()
        self._close_sent = True
        self._transport.close()

    def fail(self, code: int, reason: str) -> None:
        """Close the connection of a client that does not answer."""
        if not self._close_sent and not self._transport.is_closing():
            self._conn.fail(code, reason)
            self._write()
            self._close_sent = True
            self._transport.close()

    def _resume(self) -> None:
        if (self._queue.empty() or self._close_sent) and self._writable.is_set() and not self._steps.busy:
            self._scheduler.resume()

    def _write(self) -> None:
        """Write the output of the protocol."""
        output = b"".join(self._conn.data_to_send())
        if output and not self._transport.is_closing():
            self._transport.write(output)

    def _accept(self, request: Request) -> None:
        response = self._conn.accept(request)
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._close_sent = True
            self._conn.send_response(response)
            self._write()
            self._transport.close()
            return
        self._handshake = response
        scope = scope_of(request, self._transport, self._config, {**self._app_state, CONNECTION: self._steps})
        self._queue.put_nowait({"type": "websocket.connect"})
        task = self._loop.create_task(self._run(scope))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    async def _run(self, scope: Message) -> None:
        try:
            await self._config.loaded_app(scope, self._receive, self._send)
        except ClientGone:
            pass
        except BaseException:
            LOG.exception("a WebSocket failed in an unforeseen way")
        if not self._open and not self._close_sent:
            self._deny(HTTPStatus.INTERNAL_SERVER_ERROR)
        if self._close_timer is None:
            self._transport.close()

    async def _receive(self) -> Message:
        message = await self._queue.get()
        if self._queue.empty():
            self._resume()
        else:
            await asyncio.sleep(0)  # others run between messages of a client that does not wait for answers
        return message

    async def _send(self, message: Message) -> None:
        await self._writable.wait()
        if self._lost:
            raise ClientGone
        try:
            if self._open:
                self._send_open(message)
            else:
                self._send_handshake(message)
        except InvalidState:
            raise ClientGone from None

    def _send_open(self, message: Message) -> None:
        if self._close_sent:
            raise RuntimeError(f"Unexpected ASGI message '{message['type']}', after sending 'websocket.close'.")
        if message["type"] == "websocket.close":
            if self._transport.is_closing():
                return
            code, reason = message.get("code", 1000), message.get("reason") or ""
            self._queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
            self._conn.send_close(code, reason)
            self._close_sent = True
            self._close_timer = self._loop.call_later(CLOSE_TIMEOUT_SECONDS, self._transport.close)
            self._resume()
        elif (content := message.get("bytes")) is not None:
            self._conn.send_binary(content)
        else:
            self._conn.send_text(message["text"].encode())
        self._write()

    def _send_handshake(self, message: Message) -> None:
        match message["type"]:
            case "websocket.accept":
                assert self._handshake is not None
                headers = self._handshake.headers
                del headers["Date"]  # it is one of the headers of every answer
                for name, value in (*self._server_state.default_headers, *message.get("headers", ())):
                    headers[name.decode("latin-1")] = value.decode("latin-1")
                if protocol := message.get("subprotocol"):
                    headers["Sec-WebSocket-Protocol"] = protocol
                if not self._transport.is_closing():
                    self._open = True
                    self._conn.send_response(self._handshake)
                    self._write()
                    self._keep_alive.start()
            case "websocket.close":
                self._deny(HTTPStatus.FORBIDDEN)
            case "websocket.http.response.start":
                fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
                self._denial = message["status"], Headers(fields), b""
            case "websocket.http.response.body" if self._denial is not None:
                status, headers, body = self._denial
                self._denial = status, headers, body + message["body"]
                if not message.get("more_body", False):
                    self._deny(*self._denial)
            case kind:
                raise RuntimeError(f"Unexpected ASGI message '{kind}' before 'websocket.accept'.")

    def _deny(self, status: int, headers: Headers | None = None, body: bytes = b"") -> None:
        """Answer the request for a WebSocket with another response."""
        if self._transport.is_closing() or self._close_sent:
            return
        self._queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
        self._conn.send_response(denial(status, headers, body))
        self._close_sent = True
        self._write()
        self._transport.close()
