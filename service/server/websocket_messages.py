"""The parts of a WebSocket's messages: the request of ASGI, a denial, and the frames of one message."""

import asyncio
import email.utils
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response

from preblock.service.server.uvicorn_adapter import Config


def scope_of(request: Request, transport: asyncio.Transport, config: Config, state: dict[str, Any]) -> dict[str, Any]:
    """Return the request for a WebSocket as ASGI has it."""
    raw_path, _, query = request.path.partition("?")
    peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    headers = request.headers
    protocols = [name.strip() for line in headers.get_all("Sec-WebSocket-Protocol") for name in line.split(",")]
    return {
        "type": "websocket",
        "asgi": {"version": config.asgi_version, "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "wss" if transport.get_extra_info("sslcontext") else "ws",
        "server": tuple(own[:2]) if isinstance(own, tuple) else None,
        "client": tuple(peer[:2]) if isinstance(peer, tuple) else None,
        "root_path": config.root_path,
        "path": config.root_path + unquote(raw_path),
        "raw_path": (config.root_path + raw_path).encode("ascii"),
        "query_string": query.encode("ascii"),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.raw_items()],
        "subprotocols": protocols,
        "state": state,
        "extensions": {"websocket.http.response": {}},
    }


def denial(status: int, headers: Headers | None, body: bytes) -> Response:
    """Return a response that denies a WebSocket."""
    headers = Headers() if headers is None else headers
    headers.setdefault("Date", email.utils.formatdate(usegmt=True))
    headers.setdefault("Connection", "close")
    headers.setdefault("Content-Length", str(len(body)))
    headers.setdefault("Content-Type", "text/plain; charset=utf-8")
    return Response(status, HTTPStatus(status).phrase, headers, body)


class MessageBuffer:
    """Puts the frames of a message together.

    It is one buffer, because a list of fragments would take many times their bytes. `is_text` is of the last message.
    """

    def __init__(self) -> None:
        self.is_text = False
        self._content: bytearray | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no message is incomplete."""
        return self._content is None

    def add(self, frame: Frame) -> bytes | None:
        """Add a frame, and return the message where that is whole now."""
        if frame.opcode is not Opcode.CONT:
            self.is_text = frame.opcode is Opcode.TEXT
        if self._content is None:
            if frame.fin:
                return bytes(frame.data)
            self._content = bytearray()
        self._content += frame.data
        if not frame.fin:
            return None
        content, self._content = bytes(self._content), None
        return content


def frame_size(length: int) -> int:
    """Return the bytes of a client's frame with a payload of such a length."""
    return length + (6 if length < 126 else 8 if length < 2**16 else 14)
