"""Decoding over HTTP: lines of JSON up, and lines of JSON down as they are ready."""

import asyncio
from functools import partial

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from preblock.service.api.http import errors
from preblock.service.api.http.negotiation import NDJSON
from preblock.service.api.http.streaming.session import DecodeSession
from preblock.service.api.streams import LIFETIME, StreamEnd, StreamRegistry
from preblock.service.codecs import decode_json
from preblock.service.core.errors import TooLarge

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""A proxy that buffers would hold a step back until the next."""
FAREWELL_SECONDS = 2.0
"""How long a client may take to read the last words of a stream."""


class NdjsonStream(Response):
    """Answers each line of the body, while the body is still coming.

    Args:
        streams: the open ones.
        session: answers the lines.
        longest: bytes of a line.

    """

    def __init__(self, streams: StreamRegistry, session: DecodeSession, longest: int) -> None:
        super().__init__(media_type=NDJSON, headers=HEADERS)
        del self.headers["Content-Length"]
        self._streams, self._session, self._longest = streams, session, longest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, until the body or the stream ends.

        Raises:
            Unavailable: too many streams are open.

        """
        with self._streams.open() as lifetime:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # The server reads the client's data before it notices that the client has left.
            scope.setdefault("state", {})[LIFETIME] = lifetime
            # The client then knows at once that it may write.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
            source = LineReader(receive, self._longest)
            last = b""
            # The client's view: an answer that was not sent has fed nothing.
            told = self._session.stream.offset
            try:
                while (line := await lifetime.wait(source.line)) is not None:
                    answer = await self._session.answer_text(line)
                    body = {"type": "http.response.body", "body": answer + b"\n", "more_body": True}
                    await lifetime.wait(partial(send, body))
                    told = self._session.stream.offset
                    # Neither reading nor writing lets others run while lines wait.
                    await asyncio.sleep(0)
            except TooLarge as error:
                last = decode_json.write_error(errors.problem(error)) + b"\n"
            except StreamEnd as closing:
                last = decode_json.write_state(told, closing=closing.reason) + b"\n"
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:  # the client does not read
            return


class LineReader:
    """Lines of a body.

    Args:
        receive: of ASGI.
        longest: bytes of a line.

    """

    def __init__(self, receive: Receive, longest: int) -> None:
        self._receive, self._longest = receive, longest
        self._bytes = bytearray()
        self._searched = 0
        self._more = True

    async def line(self) -> bytes | None:
        """Return the next line with content; None at the end, or where the client left.

        Raises:
            TooLarge: a line is too long; the rest of the stream cannot be read.

        """
        while True:
            end = self._bytes.find(b"\n", self._searched)
            if end < 0 and self._more and len(self._bytes) <= self._longest:
                self._searched = len(self._bytes)
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    return None
                self._bytes += message.get("body", b"")
                self._more = message.get("more_body", False)
                continue
            size = len(self._bytes) if end < 0 else end
            if size > self._longest:
                raise TooLarge("line", f"{size} bytes", f"at most {self._longest} bytes")
            line = bytes(self._bytes[:size]).strip()
            del self._bytes[: size + 1]
            self._searched = 0
            if line:
                return line
            if end < 0:
                return None
