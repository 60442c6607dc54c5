"""The connections: each asks, is answered, and asks again, with as little of its own in between as possible."""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import httptools
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from preblock.bench.stats import Tally
from preblock.bench.workload import Ids, Target, rewind, step
from preblock.client.errors import ConnectionFailed, ServiceError, of_problem
from preblock.client.frames import ERROR, HEADER


class Link(Protocol):
    """A connection that asks: where it goes, and where it counts."""

    address: str
    tally: Tally

    async def open(self) -> None:
        """Connect.

        Raises:
            OSError: there is no connection.
            NoAnswer, ServiceError: there is one, and the server refuses what it is for.

        """
        ...

    async def ask(self, until: float) -> None:
        """Ask at least once, and until the time has come or the server wants another connection for more.

        What is wrong with an answer is counted.

        Raises:
            OSError, NoAnswer: the connection broke.

        """
        ...

    def close(self) -> None:
        """Leave."""
        ...


def kind_of(error: ServiceError) -> str:
    """Return what an error is counted as: the kind that the service names, or the status."""
    known = type(error).__name__
    return f"status {error.status}" if known in ("ClientFault", "ServerFault") else known


class _Stream(asyncio.Protocol, ABC):
    """What both links of bytes have in common: `_sent` is when the request on the way left, 0 where there is none."""

    def __init__(self, target: Target) -> None:
        self.tally, self.address = Tally(), f"{target.host}:{target.port}"
        self._target = target
        self._sent = self._until = 0.0
        self._transport: asyncio.Transport | None = None
        self._finished: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Connect."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, self._target.host, self._target.port, ssl=self._target.tls)

    async def ask(self, until: float) -> None:
        """Ask until the time has come."""
        if self._transport is None:
            raise ConnectionResetError("the server closed the connection")
        self._finished, self._until = asyncio.get_running_loop().create_future(), until
        self._send()
        await self._finished

    def close(self) -> None:
        """Leave at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what writes."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail who waits."""
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


class HttpLink(_Stream):
    """Sends the same request of HTTP/1.1 over and over.

    Args:
        target: of the load.
        request: head and body.

    """

    def __init__(self, target: Target, request: bytes) -> None:
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
        """Count an answer, and ask again."""
        status = self._parser.get_status_code()
        if status == 200:
            now = self.tally.answered(self._sent)
        else:  # a problem fits into one read, head and all
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


class StepLink(_Stream):
    """Steps through a decode stream; at max_len its rows go back to the beginning, which is not counted.

    Args:
        target: of the load.
        ids: of each step.
        max_len: of the model; None where nothing limits it.

    """

    def __init__(self, target: Target, ids: Ids, max_len: int | None) -> None:
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
        """Count bytes, and read the frames that are whole."""
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
        if self._unanswered:  # this was the rewind, whose answer comes before that of the step
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


def _roots() -> bytes | None:
    """Return whom the variable SSL_CERT_FILE trusts, as over HTTP; None for those of gRPC."""
    file = os.environ.get("SSL_CERT_FILE")
    return Path(file).read_bytes() if file else None


class GrpcLink:
    """Calls ModelInfer over a channel of its own.

    Args:
        target: of the load, whose gRPC port is known.
        ids: of each call.

    """

    def __init__(self, target: Target, ids: Ids) -> None:
        from preblock.service.codecs.v2 import open_inference_pb2 as pb

        host = f"[{target.host}]" if ":" in target.host else target.host
        self.tally, self.address = Tally(), f"{host}:{target.grpc_port}"
        self._target = target
        request = pb.ModelInferRequest(model_name=target.model, raw_input_contents=[ids.astype("<i8").tobytes()])
        request.inputs.add(name="input_ids", datatype="INT64", shape=ids.shape)
        self._request = request.SerializeToString()
        self._metadata = (("authorization", f"Bearer {target.key}"),) if target.key is not None else ()
        self._channel: Any = None
        self._call: Callable[..., Any]

    async def open(self) -> None:
        """Connect."""
        import grpc

        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channel = (
            grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(_roots()), options)
            if self._target.tls
            else grpc.aio.insecure_channel(self.address, options)
        )
        # Without readers and writers of messages, gRPC hands over bytes.
        self._call = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        await self._channel.channel_ready()

    async def ask(self, until: float) -> None:
        """Call until the time has come."""
        import grpc

        while True:
            sent = time.perf_counter()
            try:
                answer = await self._call(self._request, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    raise ConnectionFailed(str(error.details())) from error
                self.tally.failed(error.code().name, str(error.details()))
                now = time.perf_counter()
            else:
                self.tally.received += len(answer)
                now = self.tally.answered(sent)
            if now >= until:
                return

    def close(self) -> None:
        """Leave; the channel goes with its last reference."""
        self._channel = None
