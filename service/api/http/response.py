"""Answers in parts, without a copy of the whole: they are sent packet by packet, as fast as the client reads."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from preblock.service.codecs.chunks import MAX_CHUNK_BYTES, MAX_JOINED, Buffer, Part, body_chunks, body_size
from preblock.service.core.errors import TooLarge

if TYPE_CHECKING:
    from preblock.service.api.request_cache import RequestTemplate

Deflate = Any
"""The type of `zlib.compressobj()`; it has no public name."""


Headers = Sequence[tuple[bytes, bytes]]
"""As ASGI has them, names in lower case."""


def headers(values: Mapping[str, str]) -> Headers:
    """Return headers by name as they are sent."""
    return [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in values.items()]


def lines_of(values: Headers) -> bytes:
    """Return headers as lines of HTTP/1.1."""
    return b"".join([b"%b: %b\r\n" % pair for pair in values])


class ChunkedResponse(Response):
    """An answer of one type, in parts.

    `template`, where it is set, makes the request's template from the response, if later requests may use it.
    `size` is the number of bytes, None where it is known only at the end. A large response is sent within a block of
    `sending`.

    Args:
        parts: its content.
        media: its type.
        further: headers, as `headers` returns them.

    """

    def __init__(self, parts: Sequence[Part], media: str, further: Headers = ()) -> None:
        # The parent's constructor needs the whole content, and takes as long as all the rest of a small answer.
        self.template: Callable[[ChunkedResponse], RequestTemplate | None] | None = None
        self.sending: Callable[[], AbstractContextManager[None]] = nullcontext
        self.status_code = 200
        self.background = None
        self.parts = parts
        self.size = body_size(parts)
        length = [] if self.size is None else [(b"content-length", b"%d" % self.size)]
        self.raw_headers = [(b"content-type", media.encode()), *length, *further]
        self._deflate: Deflate = None

    @property
    def small(self) -> bool:
        """Whether it is sent at once."""
        return self.size is not None and self.size <= MAX_CHUNK_BYTES and len(self.parts) <= MAX_JOINED

    def compressed(self, coding: str, content: bytes | None, deflate: Deflate = None) -> None:
        """Make it one of the content coding `coding`: with that content, or by `deflate` as it is sent."""
        self.template = None
        length = [] if content is None else [(b"content-length", b"%d" % len(content))]
        self.raw_headers = [
            *(pair for pair in self.raw_headers if pair[0] != b"content-length"),
            *length,
            (b"content-encoding", coding.encode("ascii")),
            (b"vary", b"Accept-Encoding"),
        ]
        self._deflate, self.size = deflate, None
        if content is not None:
            self.parts, self.size = [content], len(content)

    def content(self) -> Iterator[Buffer]:
        """Yield the parts of the content."""
        return body_chunks(self.parts)

    async def join(self, most: float) -> None:
        """Join the parts, so that the answer has a size.

        Raises:
            TooLarge: that is more than `most` bytes.

        """
        content, size = [], 0
        async with aclosing(self.packets()) as sent:
            async for packet in sent:
                content.append(packet)
                size += len(packet)
                if size > most:
                    raise TooLarge("answer", f"more than {most} bytes for HTTP/1.0", f"at most {most}, or HTTP/1.1")
                await asyncio.sleep(0)
        self.parts, self.size, self._deflate = [b"".join(content)], size, None
        self.raw_headers.append((b"content-length", b"%d" % size))

    async def packets(self) -> AsyncGenerator[Buffer, None]:
        """Yield the content packet by packet; other requests are answered between two packets."""
        deflate = self._deflate
        with self.sending():
            for packet in body_chunks(self.parts):
                if deflate is not None:
                    # Not by the scheduler: it may refuse, but the answer has begun.
                    packet = await asyncio.get_running_loop().run_in_executor(None, deflate.compress, packet)
                if packet:  # zlib may keep it all; an empty chunk would be the end
                    yield packet
                del packet  # the next may lie where this one does
            if deflate is not None:
                yield deflate.flush()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI gives it
        """Send it, or as much of it as the client waits for."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self.small:
            for packet in self.content():
                await send({"type": "http.response.body", "body": packet, "more_body": True})
        else:
            gone = asyncio.ensure_future(_gone(receive))
            try:
                async for packet in self.packets():
                    await send({"type": "http.response.body", "body": packet, "more_body": True})
                    await asyncio.sleep(0)
                    if gone.done():
                        return
            finally:
                gone.cancel()
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
