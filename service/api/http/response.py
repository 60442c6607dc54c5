"""Responses in parts, sent packet by packet at the pace of the client, without a copy of the complete body.

Content encodings follow RFC 9110, section 12.5.3.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from preblock.service.api.http.negotiation import read_qualities
from preblock.service.api.http.request import WINDOW_BITS, RawRequest
from preblock.service.api.prepared import Content, KnownRequest, Prepared
from preblock.service.codecs.chunks import MAX_CHUNK_BYTES, MAX_JOINED, Buffer, Part, body_chunks, body_size, join
from preblock.service.core.large_bodies import WriteTurns
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastRun
from preblock.service.observability.context import Headers

LENGTH = b"content-length"
MIN_COMPRESSED_BYTES = 1024
"""A smaller response is sent without compression."""


def lines_of(values: Headers) -> bytes:
    """Return headers as HTTP/1.1 lines."""
    return b"".join([b"%b: %b\r\n" % pair for pair in values])


class ChunkedResponse(Response):
    """A response of tensors, in parts.

    Args:
        parts: content.
        media: content type.
        further: further headers.

    Attributes:
        prepare: prepares later requests from this response; None if it cannot.
        sending: context manager for the time of sending a large response.
        turns: turns of a large response with others.
        size: size of the content in bytes; None if it is unknown until the end.

    """

    def __init__(self, parts: Sequence[Part], media: str, further: Headers = ()) -> None:
        # The constructor of the parent needs the complete content, and would double the time of a small response.
        self.prepare: Callable[[ChunkedResponse], KnownHttpRequest | None] | None = None
        self.sending: Callable[[], AbstractContextManager[None]] = nullcontext
        self.turns: WriteTurns | None = None
        self.status_code = 200
        self.background = None
        self.parts = parts
        self.size = body_size(parts)
        length = [] if self.size is None else [(LENGTH, b"%d" % self.size)]
        self.raw_headers = [(b"content-type", media.encode()), *length, *further]
        self._compressor: Any = None  # the type of `zlib.compressobj()` has no public name

    @property
    def inline(self) -> bool:
        """Whether the content is short enough to be sent at once."""
        return self.size is not None and self.size <= MAX_CHUNK_BYTES and len(self.parts) <= MAX_JOINED

    def compress(self, encoding: str, compressor: Any) -> None:
        """Compress the content while it is sent. `compressor` is a `zlib.compressobj` of this content encoding."""
        self.prepare, self.size, self._compressor = None, None, compressor
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != LENGTH]
        self.raw_headers += [(b"content-encoding", encoding.encode("ascii")), (b"vary", b"Accept-Encoding")]

    def set_content(self, content: bytes) -> None:
        """Set the content, already compressed where needed, and its length."""
        self.parts, self.size, self._compressor = [content], len(content), None
        self.raw_headers.append((LENGTH, b"%d" % len(content)))

    def content(self) -> Iterator[Buffer]:
        """Yield the content without compression."""
        return body_chunks(self.parts)

    async def packets(self) -> AsyncGenerator[Buffer, None]:
        """Yield the content packet by packet, compressed where needed."""
        compressor = self._compressor
        with self.sending():
            for packet in body_chunks(self.parts):
                if compressor is not None:
                    # The scheduler may reject work, but this response has already begun.
                    packet = await asyncio.get_running_loop().run_in_executor(None, compressor.compress, packet)
                if packet:  # zlib may buffer all of it, and an empty chunk would end the body
                    yield packet
                del packet  # lets the next packet reuse this buffer
            if compressor is not None:
                yield compressor.flush()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI passes it
        """Send the response, and stop early if the client disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self.inline:
            for packet in self.content():
                await send({"type": "http.response.body", "body": packet, "more_body": True})
        else:
            disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
            turns = self.turns or WriteTurns()
            try:
                await turns.wait(next_chunk=False)
                async for packet in self.packets():
                    await send({"type": "http.response.body", "body": packet, "more_body": True})
                    await turns.wait()
                    if disconnected.done():
                        return
            finally:
                disconnected.cancel()
        await send({"type": "http.response.body", "body": b""})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(eq=False, slots=True)
class KnownHttpRequest(KnownRequest):
    """A prepared request over HTTP.

    Args:
        headers: response headers, except those of the connection.
        size: of the last response, in bytes.
        lines: headers of the last response, as HTTP/1.1 lines.

    """

    headers: Headers
    size: int | None
    lines: bytes

    @classmethod
    def of(
        cls, prepared: Prepared | None, address: tuple[str, str | None], response: ChunkedResponse
    ) -> "KnownHttpRequest | None":
        """Return a prepared request, with the address of its model and its first response; None without one."""
        if prepared is None:
            return None
        return cls(prepared, *address, response.raw_headers, response.size, lines_of(response.raw_headers))

    def compute(self, run: FastRun) -> tuple[bytes, Content]:
        """Compute the header lines and the content of a response."""
        content = self.prepared.respond(run)
        size, _ = content
        if size != self.size:
            self.size, length = size, b"%d" % size
            self.lines = lines_of([(name, length if name == LENGTH else value) for name, value in self.headers])
        return self.lines, content


@lru_cache  # clients repeat their headers
def choose_encoding(accept: str, text: bool) -> str | None:
    """Return the content encoding for a response to `Accept-Encoding: {accept}`; None for no compression.

    HTTP libraries accept encodings by default. Numbers as `text` shrink by half, so any accepted encoding is used. Raw
    bytes and base64 shrink by a tenth, and compression multiplies their response time. So the header must then name
    exactly one encoding.
    """
    try:
        qualities = read_qualities(accept)
    except ValueError:
        return None
    if not text and len(qualities) != 1:
        return None
    best = max((*WINDOW_BITS, "identity"), key=lambda encoding: qualities.get(encoding, 0.0))
    return best if best in WINDOW_BITS and qualities.get(best, 0.0) > 0 else None


async def write_body(response: ChunkedResponse, request: RawRequest, engine: Engine, text: bool) -> ChunkedResponse:
    """Return `response`, compressed if `request` accepts it. `text` states whether it holds numbers as text.

    A large response counts as a concurrent request of `engine` until it is sent.
    """
    parts, size = response.parts, response.size
    accept = request.list_header(b"accept-encoding")
    encoding = choose_encoding(accept, text) if accept else None
    if encoding is not None and (size is None or size >= MIN_COMPRESSED_BYTES):
        compressor = zlib.compressobj(zlib.Z_BEST_SPEED, wbits=WINDOW_BITS[encoding])
        response.compress(encoding, compressor)
        if size is not None and size <= MAX_CHUNK_BYTES:

            def compress() -> bytes:
                return compressor.compress(join(parts)) + compressor.flush()

            response.set_content(await engine.scheduler.run(size, compress, text=True))
    response.sending, response.turns = engine.limits.extend, engine.limits.turns
    return response
