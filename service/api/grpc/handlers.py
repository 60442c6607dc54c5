"""Handlers of gRPC methods: request context, compression, errors as statuses, and the drain of open calls."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any
from urllib.parse import unquote

import grpc

from preblock.service.api.grpc.errors import SERVICE, context_of, fail
from preblock.service.api.grpc.message_reader import MessageReader, receive_message
from preblock.service.api.grpc.prepared import MESSAGE_COPIES
from preblock.service.api.streams import StreamEnd, StreamLifetime, StreamRegistry
from preblock.service.codecs.v2.protobuf import read as parse
from preblock.service.codecs.v2.protobuf import write
from preblock.service.core.errors import INTERNAL_ERROR_MESSAGE, Malformed, PreblockError, Unavailable
from preblock.service.engine.engine import Engine

GRPC, GRPC_STREAM = "grpc", "grpc-stream"
END_REASONS = {
    "shutdown": "the shutdown of the server",
    "idle": "an idle timeout",
    "time": "the maximum lifetime of a stream",
    "key": "a removed or changed key",
}
COMPRESSIONS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
ACCEPT = "accept-encoding"
"""Metadata with the requested compression, as in HTTP. gRPC itself lists only the encodings of the client's library."""
MESSAGE_EXPANSION = 4
"""Most memory of a message and its parsed copies, in sizes of the message; raw tensors have fewer copies."""
DRAIN_POLL_INTERVAL_SECONDS = 0.02
LOG = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[bytes | None]]
Send = Callable[[bytes], Awaitable[None]]
Document = dict[str, Any]
Method = Callable[[Any], Awaitable[Document | bytes | None]]
"""Returns bytes of a message, or a document of its fields; None for a message without fields."""
StreamMethod = Callable[[Receive, Send, StreamLifetime], Awaitable[None]]
Answer = Callable[[grpc.aio.ServicerContext], Awaitable[bytes | None]]


class CallHandlers:
    """Makes the handlers of a server's methods, and drains their calls at its end.

    Args:
        engine: decodes requests, counts bytes and identifies callers.
        streams: registry of open streams.

    """

    def __init__(self, engine: Engine, streams: StreamRegistry) -> None:
        self._engine, self._streams = engine, streams
        self._reader = MessageReader(engine.settings)
        self._open: set[Any] = set()

    def unary(self, method: Method, kind: Any, answer_kind: Any) -> grpc.RpcMethodHandler:
        """Return the handler of a unary method.

        Args:
            method: the method.
            kind: class of its requests; None for bytes.
            answer_kind: class of its answers, for documents.

        """

        async def answer(call: grpc.aio.ServicerContext) -> bytes:
            # Only inference has large messages. Other calls of the same connection wait for no turn.
            read, began = self._reader.read if kind is None else receive_message, perf_counter()
            message = await read(call)
            if message is None:
                await asyncio.sleep(0)  # if the client has left, the cancellation of this task follows
                raise Malformed("message", "no message", "one message")
            read_seconds, size, run = perf_counter() - began, len(message), self._engine.scheduler.run
            async with self._engine.limits.bodies.hold(MESSAGE_EXPANSION * size):
                response = await method(message if kind is None else await run(size, partial(parse, kind, message)))
            written = response if isinstance(response, bytes) else write(answer_kind, response or {})
            context_of(call).keep(MESSAGE_COPIES * len(written))
            self._engine.metrics.count_bytes(GRPC, size, len(written), read_seconds)
            call.set_trailing_metadata(context_of(call).metadata())
            return written

        # The request is a stream of one message, so that the reader decides when to read it. Without a deserializer
        # gRPC passes bytes. Its own error for invalid bytes would reveal internals.
        return grpc.stream_unary_rpc_method_handler(partial(self._run, answer, method.__name__))

    def stream(self, method: StreamMethod) -> grpc.RpcMethodHandler:
        """Return the handler of a streaming method."""
        count_bytes = self._engine.metrics.count_bytes

        async def answer(call: grpc.aio.ServicerContext) -> None:
            size = 0

            async def receive() -> bytes | None:
                nonlocal size
                message = await self._reader.read_next(call, size)
                if message is not None:
                    size = len(message)
                    count_bytes(GRPC_STREAM, size, 0)
                return message

            async def send(response: bytes) -> None:
                began = perf_counter()
                context_of(call).keep(MESSAGE_COPIES * len(response))
                try:
                    await call.write(response)
                except grpc.aio.InternalError:  # the client left; the cancellation of this task follows
                    raise asyncio.CancelledError from None
                context_of(call).release()
                count_bytes(GRPC_STREAM, 0, len(response), 0, perf_counter() - began)

            context_of(call).set_status("OPEN")  # the log has lines of its messages before the stream ends
            try:
                with self._streams.open() as lifetime:
                    await method(receive, send, lifetime)
            except StreamEnd as end:
                # After the status OK, clients would wait for the responses to their next messages.
                reason = END_REASONS[end.reason]
                message = f"the stream was closed because of {reason}; open a new one later, or on another server"
                raise Unavailable("stream", reason, "an open stream", message=message) from None

        return grpc.stream_stream_rpc_method_handler(partial(self._run, answer, method.__name__))

    async def _run(self, answer: Answer, name: str, _: Any, call: grpc.aio.ServicerContext) -> bytes | None:
        """Answer a call of the method `name`, and count it until its status is sent."""
        context = context_of(call)
        peer = unquote(call.peer())  # ipv4:127.0.0.1:5, ipv6:[::1]:5, or unix:
        host = peer.rpartition(":")[0].partition(":")[2].strip("[]")
        context.target = "POST", f"/{SERVICE}/{name}", host
        encoding = dict(call.invocation_metadata() or ()).get(ACCEPT)
        if encoding in COMPRESSIONS:
            call.set_compression(COMPRESSIONS[encoding])
            # With the response of a unary call, grpcio would send the compression too late.
            await call.send_initial_metadata(())
        self._open.add(call)
        call.add_done_callback(self._open.discard)
        call.add_done_callback(lambda _: context.release())  # after an error too, and after the client has read
        access = self._engine.repository.access
        if not access.needs_key:
            access.identify(host)
        status = grpc.StatusCode.CANCELLED
        try:
            response = await answer(call)
            status = grpc.StatusCode.OK
            return response
        except PreblockError as error:
            status = fail(call, error)
        except Exception:
            LOG.exception("internal error in a gRPC call")
            status = grpc.StatusCode.INTERNAL
            call.set_code(status)
            call.set_details(INTERNAL_ERROR_MESSAGE)
        finally:
            context.set_status(status.name)
        return None

    async def drain(self, server: grpc.aio.Server, seconds: float) -> None:
        """Accept no new call, and stop the server after the open calls end, or after `seconds`.

        A health watch never ends, and delays nothing.
        """
        stopping = asyncio.create_task(server.stop(seconds))
        while self._open and not stopping.done():
            await asyncio.sleep(DRAIN_POLL_INTERVAL_SECONDS)
        await server.stop(None)
        await stopping
