"""A TCP proxy with failures chosen by a test."""

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

DROP, SWALLOW, CUT, STALL, PASS = "drop", "swallow", "cut", "stall", "pass"


@dataclass(frozen=True)
class After:
    """Both ends are cut off once so many bytes were carried: to the server, or to the client."""

    up: int | None = None
    down: int | None = None


Act = str | bytes | After


def canned(status: str, body: bytes = b"", *headers: str) -> bytes:
    """Write an answer of HTTP."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class FlakyProxy:
    """Handles each connection as `script` says, the later ones with `PASS`.

    `DROP` closes it at once, `SWALLOW` when the request has come, `CUT` within the answer; `STALL` never answers; bytes
    are an answer of their own; `PASS` carries everything, `After` up to a byte.
    """

    def __init__(self, target: str) -> None:
        self.aim(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # for held requests; connections have it
        self._open: list[socket.socket] = []
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.script: list[Act] = []
        self.connections = 0
        self._requests, self._answers = threading.Event(), threading.Event()
        self.release()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.release()
        self.break_all()

    def aim(self, target: str) -> None:
        """Carry later connections to `target`."""
        parts = urlsplit(target)
        self._target = (str(parts.hostname), int(parts.port or 0))

    def break_all(self) -> None:
        """Break every existing connection, but none opened meanwhile, such as a retry."""
        connections, self._open = self._open, []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def hold(self) -> None:
        """Hold the server's answers until `release`."""
        self._answers.clear()

    def hold_requests(self) -> None:
        """Read only the beginning of each request until `release_requests`."""
        self._requests.clear()

    def release_requests(self) -> None:
        """Read the held requests."""
        self._requests.set()

    def release(self) -> None:
        """Pass everything on."""
        self._requests.set()
        self._answers.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(client)
            act = self.script.pop(0) if self.script else PASS
            threading.Thread(target=self._handle, args=(client, act), daemon=True).start()

    def _handle(self, client: socket.socket, act: Act) -> None:
        try:
            if act == DROP:
                client.close()
            elif act == STALL:
                client.recv(2**16)
            elif act in (PASS, CUT) or isinstance(act, After):
                self._carry(client, act)
            else:
                client.recv(2**16)
                client.sendall(act if isinstance(act, bytes) else b"")
                client.close()
        except OSError:
            client.close()

    def _carry(self, client: socket.socket, act: Act) -> None:
        server = socket.create_connection(self._target)
        self._open.append(server)
        limits = act if isinstance(act, After) else After()
        threading.Thread(target=_copy, args=(client, server, limits.up, self._requests), daemon=True).start()
        if act == CUT:
            client.sendall(server.recv(2**16)[:-1])
            client.shutdown(socket.SHUT_RDWR)
        else:
            _copy(server, client, limits.down, self._answers)


def _copy(source: socket.socket, target: socket.socket, limit: int | None, flowing: threading.Event) -> None:
    """Copy until the end, or `limit` bytes and no more of either direction."""
    with suppress(OSError):
        while data := source.recv(2**16):
            flowing.wait()
            target.sendall(data[:limit])
            if limit is not None:
                limit -= len(data)
                if limit <= 0:
                    source.shutdown(socket.SHUT_RDWR)
                    break
        target.shutdown(socket.SHUT_WR if limit is None else socket.SHUT_RDWR)
