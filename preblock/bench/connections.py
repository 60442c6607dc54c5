"""The connections of a measurement. Each sends a prepared request and waits for the answer, with little overhead.

All have an `address` and three methods:

- `open` connects, also after `close`. It raises OSError without a connection; NoAnswer or ServiceError if the server
  refuses the stream.
- `exchange` sends a request and returns the number of bytes of the answer. After a ServiceError, the connection can be
  used again. OSError and NoAnswer mean that it broke.
- `close` closes the connection at once.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httptools
import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from preblock.bench.workload import Ids, LoadTarget
from preblock.client.errors import KIND_PREFIX, ConnectionFailed, ServiceError, of_problem
from preblock.client.messages import ERROR, HEADER, REWIND, write_move, write_step
from preblock.client.sockets import failures


class HttpConnection(asyncio.Protocol):
    """Repeats one HTTP/1.1 request.

    Args:
        target: target of the load.
        request: header block and body.

    """

    def __init__(self, target: LoadTarget, request: bytes) -> None:
        self.address = f"{target.host}:{target.port}"
        self._target, self._request = target, request
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] | None = None

    async def open(self) -> None:
        """Connect."""
        self._parser, self._keep_alive = httptools.HttpResponseParser(self), True
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: self, self._target.host, self._target.port, ssl=self._target.tls
        )

    async def exchange(self) -> int:
        """Send the request, and return the number of bytes of the answer, headers included."""
        if not self._keep_alive:
            self.close()
            await self.open()
        if self._transport is None:
            raise ConnectionResetError("the server closed the connection")
        self._answer, self._received = asyncio.get_running_loop().create_future(), 0
        self._transport.write(self._request)
        return await self._answer

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the waiting request."""
        self.close()
        self._fail(error or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        """Count bytes, and parse them."""
        self._received += len(data)
        self._last = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionFailed(f"an answer that is not HTTP ({error})"))
            self.close()

    def on_message_complete(self) -> None:
        """Finish the waiting request."""
        self._keep_alive = self._parser.should_keep_alive()
        status = self._parser.get_status_code()
        if status != 200:  # a problem document and its headers fit into one read
            self._fail(of_problem(status, self._last.partition(b"\r\n\r\n")[2]))
        elif self._answer and not self._answer.done():
            self._answer.set_result(self._received)

    def _fail(self, error: Exception) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(error)


class DecodeConnection:
    """Sends steps of a decode stream. At max_len its rows are set back to offset 0, without being counted.

    Args:
        target: target of the load.
        ids: ids of each step, int64 (rows, tokens).
        max_len: limit of the model; None without one.

    """

    def __init__(self, target: LoadTarget, ids: Ids, max_len: int | None) -> None:
        scheme, path = "wss" if target.tls else "ws", target.path("decode")
        self.address = f"{scheme}://{target.address.netloc.decode()}{path}?rows={len(ids)}"
        self._target = target
        self._step = write_step({"input_ids": ids.ravel()}, np.full(len(ids), ids.shape[1]), 0, (), ())
        self._rewind = write_move(REWIND, np.zeros(1, np.int64), 0)
        self._max_steps = max_len // ids.shape[1] if max_len is not None else 2**60
        self._socket: ClientConnection | None = None

    async def open(self) -> None:
        """Connect, and open a stream."""
        self._steps = 0
        with failures(self.address):
            self._socket = await connect(
                self.address,
                additional_headers=self._target.headers,
                user_agent_header=None,
                compression=None,
                max_size=None,
                open_timeout=None,
                ping_interval=None,
                proxy=None,
                ssl=self._target.tls,
            )

    async def exchange(self) -> int:
        """Send a step, and return the number of bytes of the answer."""
        assert self._socket is not None
        answers = 1
        with failures(self.address):
            if self._steps and self._steps % self._max_steps == 0:
                await self._socket.send(self._rewind)
                answers = 2
            self._steps += 1
            await self._socket.send(self._step)
            for _ in range(answers):
                frame = await self._socket.recv(decode=False)
        if frame[5] == ERROR:
            raise of_problem(0, frame[HEADER.size :])
        return len(frame)

    def close(self) -> None:
        """Close the connection at once."""
        if self._socket is not None:
            self._socket.transport.abort()


class GrpcConnection:
    """Repeats one ModelInfer call over its own channel.

    Args:
        target: target of the load, with a gRPC port.
        ids: ids of each call.

    """

    def __init__(self, target: LoadTarget, ids: Ids) -> None:
        from preblock.service.codecs.v2 import open_inference_pb2 as pb

        host = f"[{target.host}]" if ":" in target.host else target.host
        self.address = f"{host}:{target.grpc_port}"
        self._target = target
        request = pb.ModelInferRequest(model_name=target.model, raw_input_contents=[ids.astype("<i8").tobytes()])
        request.model_version = "" if target.version is None else str(target.version)
        request.inputs.add(name="input_ids", datatype="INT64", shape=ids.shape)
        request.outputs.add(name="embeddings")
        self._request = request.SerializeToString()
        self._metadata = (("authorization", f"Bearer {target.key}"),) if target.key is not None else ()
        self._channel: Any = None
        self._call: Callable[..., Any]

    async def open(self) -> None:
        """Connect."""
        import grpc

        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        if self._target.tls is None:
            self._channel = grpc.aio.insecure_channel(self.address, options)
        else:
            roots = os.environ.get("SSL_CERT_FILE")  # as over HTTP; else the defaults of gRPC
            credentials = grpc.ssl_channel_credentials(Path(roots).read_bytes() if roots else None)
            self._channel = grpc.aio.secure_channel(self.address, credentials, options)
        # Without serializers, gRPC passes bytes.
        self._call = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        await self._channel.channel_ready()

    async def exchange(self) -> int:
        """Send the call, and return the number of bytes of the answer."""
        import grpc

        try:
            return len(await self._call(self._request, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ConnectionFailed(str(error.details())) from error
            raise ServiceError({"type": KIND_PREFIX + error.code().name, "detail": error.details()}) from error

    def close(self) -> None:
        """Drop the channel; it closes with its last reference."""
        self._channel = None
