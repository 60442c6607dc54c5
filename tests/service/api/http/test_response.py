"""Answers in chunks. The formats themselves are in routes/test_embed_formats.py."""

import asyncio
from typing import Any

from preblock.service.api.http.response import ChunkedResponse
from preblock.service.codecs.chunks import MAX_CHUNK_BYTES, Base64Chunks


def test_disconnect_stops_chunked_response() -> None:
    sent: list[int] = []
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        sent.append(len(message.get("body", b"")))
        if len(sent) == 3:
            left.set()
        await asyncio.sleep(0)

    response = ChunkedResponse([b"x", Base64Chunks((bytes(100 * MAX_CHUNK_BYTES),))], "application/json")
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(response(scope, receive, take))
    assert 0 < sum(sent) < 10 * MAX_CHUNK_BYTES
