"""The calls that are being answered: how their answers are compressed, and the end of the server after the last."""

import asyncio
from typing import Any

import grpc

COMPRESSIONS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}
ACCEPT = "accept-encoding"
"""Metadata that names one of them, as the header of HTTP does. What gRPC itself tells of a client is which codings its
library can read, and whether its message came compressed reaches nobody here.
"""
LOOK_SECONDS = 0.02
"""Between two looks whether the last call has ended."""


class InflightCalls:
    """The calls of one server."""

    def __init__(self) -> None:
        self._open: set[Any] = set()

    async def begin(self, context: grpc.aio.ServicerContext) -> None:
        """Compress the answers of a call where it asks for that, and count it until its status has been sent."""
        asked = dict(context.invocation_metadata() or ()).get(ACCEPT)
        if asked in COMPRESSIONS:
            context.set_compression(COMPRESSIONS[asked])
            # With the answer, grpcio would send it too late for a call that has one.
            await context.send_initial_metadata(())
        self._open.add(context)
        context.add_done_callback(self._open.discard)

    async def finish(self, server: grpc.aio.Server, seconds: float) -> None:
        """Take no call any more, and end the server once those that were taken have their answers.

        What does not end of itself, such as a watch of its health, holds nothing up; after `seconds` nothing does.
        """
        stopping = asyncio.create_task(server.stop(seconds))
        while self._open and not stopping.done():
            await asyncio.sleep(LOOK_SECONDS)
        await server.stop(None)
        await stopping
