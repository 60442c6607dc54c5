"""The connections of a measurement: each sends a request, waits for the answer, and repeats, with little overhead."""

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Protocol, cast

import httptools
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from preblock.bench.stats import LoadCounters
from preblock.bench.workload import Ids, LoadTarget, rewind, step
from preblock.client.errors import ConnectionFailed, ServiceError, of_problem
from preblock.client.frames import ERROR, HEADER


class LoadConnection(Protocol):
    """A connection under load, with its address and its counters."""

    address: str
    tally: LoadCounters

    async def open(self) -> None:
        """Connect.

        Raises:
            OSError: there is no connection.
            NoAnswer, ServiceError: the server refuses the stream.

        """
        ...

    async def ask(self, until: float) -> None:
        """Send at least one request, and more until the time `until` or until the server closes the connection.

        Errors in answers are counted.

        Raises:
            OSError, NoAnswer: the connection broke.

        """
        ...

    def close(self) -> None:
        """Close the connection at once."""
        ...


def kind_of(error: ServiceError) -> str:
    """Return the kind of an error for the counters: the kind named by the service, or the status."""
    known = type(error).__name__
    return f"status {error.status}" if known in ("ClientFault", "ServerFault") else known


class _ByteConnection(asyncio.Protocol, ABC):
    """A connection over a byte stream; `_sent` is the time of the request in flight, 0 without one."""

    def __init__(self, target: LoadTarget) -> None:
        self.tally, self.address = LoadCounters(), f"{target.host}:{target.port}"
        self._target = target
        self._sent = self._until = 0.0
        self._transport: asyncio.Transport | None = None
        self._finished: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Connect."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, self._target.host, self._target.port, ssl=self._target.tls)

    async def ask(self, until: float) -> None:
        """Send requests until the time `until`."""
        if self._transport is None:
            raise ConnectionResetError("the server closed the connection")
        self._finished, self._until = asyncio.get_running_loop().create_future(), until
        self._send()
        await self._finished

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the waiting request."""
        self._transport = None
        self._fail(error or ConnectionResetError("the server closed the connection"))

    @abstractmethod
    def _send(self) -> None:
        """Send the next request."""

    def _go_on(self, now: float) -> None:
        if now < self._until:
            self._send()
        elif self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(error)


class HttpConnection(_ByteConnection):
    """Repeats one HTTP/1.1 request.

    Args:
        target: target of the load.
        request: header block and body.

    """

    def __init__(self, target: LoadTarget, request: bytes) -> None:
        super().__init__(target)
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._last = b""

    def data_received(self, data: bytes) -> None:
        """Count bytes, and parse them."""
        self.tally.received += len(data)
        self._last = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionFailed(f"an answer that is not HTTP ({error})"))
            self.close()

    def on_message_complete(self) -> None:
        """Count an answer, and send the next request."""
        status = self._parser.get_status_code()
        if status == 200:
            now = self.tally.answered(self._sent)
        else:  # a problem document and its headers fit into one read
            now = time.perf_counter()
            error = of_problem(status, self._last.partition(b"\r\n\r\n")[2])
            self.tally.failed(kind_of(error), str(error.problem.get("detail") or error.problem.get("error")))
        if not self._parser.should_keep_alive():
            self._until = 0.0
        self._go_on(now)

    def _send(self) -> None:
        if self._transport is not None:
            self._sent = time.perf_counter()
            self._transport.write(self._request)


class DecodeConnection(_ByteConnection):
    """Sends steps of a decode stream. At max_len its rows are set back to offset 0, without being counted.

    Args:
        target: target of the load.
        ids: ids of each step.
        max_len: limit of the model; None without one.

    """

    def __init__(self, target: LoadTarget, ids: Ids, max_len: int | None) -> None:
        super().__init__(target)
        self._step, self._rewind = step(ids), rewind()
        self._most = max_len // ids.shape[1] if max_len is not None else 2**60
        self._steps = self._unanswered = self._kind = 0
        scheme, path = "wss" if target.tls else "ws", target.path("models", target.model, "decode")
        address = f"{scheme}://{target.address.netloc.decode()}{path}?rows={len(ids)}"
        self._socket = ClientProtocol(parse_uri(address), max_size=None)

    async def open(self) -> None:
        """Connect, and open a stream."""
        self._finished = asyncio.get_running_loop().create_future()
        await super().open()
        request = self._socket.connect()
        request.headers.update(self._target.headers)
        self._socket.send_request(request)
        self._flush()
        await self._finished

    def data_received(self, data: bytes) -> None:
        """Count bytes, and read complete frames."""
        self.tally.received += len(data)
        self._socket.receive_data(data)
        for event in self._socket.events_received():
            if isinstance(event, Response):
                self._accepted(event)
            elif isinstance(event, Frame):
                self._answered(event)
        self._flush()

    def _accepted(self, response: Response) -> None:
        refused = self._socket.handshake_exc
        if refused is None:
            self._go_on(self._until)
        elif isinstance(refused, InvalidStatus):
            self._fail(of_problem(response.status_code, bytes(response.body or b"")))
        else:
            self._fail(ConnectionFailed(str(refused)))

    def _answered(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self._fail(ConnectionFailed(f"the server closed the stream ({self._socket.close_rcvd})"))
        if frame.opcode is Opcode.BINARY:
            self._kind = frame.data[5]
        elif frame.opcode is not Opcode.CONT:
            return
        if not frame.fin:
            return
        self._unanswered -= 1
        if self._unanswered:  # the answer to the rewind, before the answer to the step
            return
        if self._kind == ERROR:
            now, error = time.perf_counter(), of_problem(0, bytes(frame.data[HEADER.size :]))
            self.tally.failed(kind_of(error), str(error))
        else:
            now = self.tally.answered(self._sent)
        self._go_on(now)

    def _send(self) -> None:
        if self._steps and self._steps % self._most == 0:
            self._socket.send_binary(self._rewind)
            self._unanswered += 1
        self._steps += 1
        self._unanswered += 1
        self._sent = time.perf_counter()
        self._socket.send_binary(self._step)
        self._flush()

    def _flush(self) -> None:
        for data in self._socket.data_to_send():
            if self._transport is not None and data:
                self._transport.write(data)
