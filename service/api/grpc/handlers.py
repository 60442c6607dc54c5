"""The open calls: the compression of their answers, and the end of the server after the last."""

import asyncio
from typing import Any

import grpc

COMPRESSIONS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
ACCEPT = "accept-encoding"
"""Metadata with the name of a coding, as in HTTP's header. gRPC itself only tells the codings that the client's library
can read.
"""
LOOK_SECONDS = 0.02
"""Between two looks whether the last call has ended."""


class InflightCalls:
    """The calls of one server."""

    def __init__(self) -> None:
        self._open: set[Any] = set()

    async def begin(self, context: grpc.aio.ServicerContext) -> None:
        """Compress the answers of a call where it asks for it, and count the call until its status was sent."""
        asked = dict(context.invocation_metadata() or ()).get(ACCEPT)
        if asked in COMPRESSIONS:
            context.set_compression(COMPRESSIONS[asked])
            # With the answer, grpcio would send it too late for a unary call.
            await context.send_initial_metadata(())
        self._open.add(context)
        context.add_done_callback(self._open.discard)

    async def finish(self, server: grpc.aio.Server, seconds: float) -> None:
        """Take no new call, and end the server after the answers to the open calls.

        An endless call, such as a health watch, holds nothing up; after `seconds` no call does.
        """
        stopping = asyncio.create_task(server.stop(seconds))
        while self._open and not stopping.done():
            await asyncio.sleep(LOOK_SECONDS)
        await server.stop(None)
        await stopping
