"""Answers as they are sent: in parts that are joined nowhere, packet by packet, as fast as the client takes them."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from incipit.service.wire.content import PACKET, Part, packets

Deflate = Any
"""What `zlib.compressobj` returns, which has no public name."""


class Reply(Response):
    """An answer of one type, in parts.

    Args:
        parts: its content.
        media: its type.
        headers: further ones.

    """

    def __init__(self, parts: Sequence[Part], media: str, headers: Mapping[str, str] | None = None) -> None:
        # Not as the parent does it, which wants the content whole, and takes as long as all the rest of a small answer.
        self.status_code = 200
        self.background = None
        self.parts = parts
        self.size = sum(map(len, parts))
        self.raw_headers = [(b"content-type", media.encode("ascii")), (b"content-length", b"%d" % self.size)]
        for name, value in (headers or {}).items():
            self.raw_headers.append((name.lower().encode("ascii"), value.encode("ascii")))
        self._deflate: Deflate = None

    @property
    def small(self) -> bool:
        """Whether it is sent at once."""
        return self.size <= PACKET

    def compressed(self, coding: str, content: bytes | None, deflate: Deflate = None) -> None:
        """Make it one of the content coding `coding`: with that content, or by `deflate` as it is sent."""
        length = [] if content is None else [(b"content-length", b"%d" % len(content))]
        self.raw_headers = [
            *(pair for pair in self.raw_headers if pair[0] != b"content-length"),
            *length,
            (b"content-encoding", coding.encode("ascii")),
            (b"vary", b"Accept-Encoding"),
        ]
        self._deflate = deflate
        if content is not None:
            self.parts, self.size = [content], len(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as ASGI has it
        """Send it, or as much of it as the client waits for."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self.small and self._deflate is None:
            *others, last = packets(self.parts)
            for packet in others:
                await send({"type": "http.response.body", "body": packet, "more_body": True})
            await send({"type": "http.response.body", "body": last})
            return
        gone = asyncio.ensure_future(_gone(receive))
        try:
            for packet in packets(self.parts):
                # Not by the scheduler, which may refuse: the answer has begun.
                body = await run_in_threadpool(self._deflate.compress, packet) if self._deflate else packet
                if gone.done():
                    return
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": self._deflate.flush() if self._deflate else b""})
        finally:
            gone.cancel()


async def _gone(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
