"""The responses to pipelined requests that end with an error, a close or a WebSocket, for any segments of the input.

Oracles: the statuses of each request alone, and the responses to the whole stream in one segment.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.random import Generator

from tests.reliability.wires import IDS, UPGRADE, frame, request
from tests.support.servers import Server, serve

EMBED, NOWHERE, DECODE = "/models/gpt/embed", "/nowhere", "/models/gpt/decode"
CHUNKED = "Transfer-Encoding: chunked"
BYTES = "Accept: application/octet-stream"
OFFER = ("Upgrade: h2c", "Connection: Upgrade")
LINE = json.dumps({"input_ids": [1]}).encode() + b"\n"
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Piece:
    """Bytes of a client, and the statuses of their responses."""

    sent: bytes
    statuses: tuple[int, ...]


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "Host: localhost", *headers, "", ""]).encode()


def in_chunks(path: str, *parts: bytes, end: bytes = b"0\r\n\r\n", headers: Sequence[str] = ()) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return request(path, body + end, CHUNKED, *headers)


DOCUMENT = json.dumps({"input_ids": [IDS]}).encode()
GOOD = (
    Piece(request(), (200,)),
    Piece(request(EMBED, None, BYTES), (200,)),
    Piece(request(EMBED, None, BYTES), (200,)),
    Piece(request(EMBED, b'{"input_ids": [99]}'), (422,)),
    Piece(in_chunks(EMBED, DOCUMENT[:5], DOCUMENT[5:]), (200,)),
    Piece(in_chunks(EMBED, DOCUMENT, end=b"0\r\nAccept: application/x-npy\r\n\r\n"), (200,)),
    Piece(in_chunks(EMBED, DOCUMENT, headers=["Expect: 100-continue"]), (100, 200)),
    Piece(in_chunks(DECODE, LINE, LINE[:4], LINE[4:], headers=["Content-Type: application/x-ndjson"]), (200,)),
    Piece(request(NOWHERE, get("/livez")), (404,)),
    Piece(in_chunks(NOWHERE, get("/livez")), (404,)),
    Piece(request("/livez", b""), (405,)),
    Piece(get("/livez"), (200,)),
    Piece(b"\r\n" + get("/v2/health/ready"), (200,)),
    Piece(get("/models/none", *OFFER), (404,)),
    Piece(request(EMBED, None, BYTES, *OFFER), (200,)),
    Piece(request(NOWHERE, get("/livez"), *OFFER), (404,)),
    Piece(in_chunks(EMBED, DOCUMENT[:5], DOCUMENT[5:], headers=OFFER), (200,)),
    Piece(get("/livez").replace(b"GET", b"HEAD"), (200,)),
)
CLOSE = frame(8, (1000).to_bytes(2, "big"))
CUT = b"5\r\n12345\r\nzz\r\n"
LAST = (
    Piece(b"\x00garbage\r\n\r\n", (400,)),
    Piece(b"GET / HT\x00TP\r\n\r\n", (400,)),
    Piece(get("/livez").replace(b"Host: localhost\r\n", b""), (400,)),
    Piece(get("/livez", "Host: localhost"), (400,)),
    Piece(request(EMBED, b"{}", "Content-Length: 2", "Content-Length: 3"), (400,)),
    Piece(request(EMBED, b"{}", "Content-Length: 2", CHUNKED), (400,)),
    Piece(request(EMBED, b"{}", "Transfer-Encoding: gzip, chunked"), (501,)),
    Piece(request(EMBED, b"{}", "Transfer-Encoding: gzip"), (501,)),
    Piece(get("/livez", "X-Long: " + "a" * 2**16), (431,)),
    Piece(in_chunks(EMBED, b"{}", end=b"0\r\nX-Long: " + b"a" * 2**16 + b"\r\n\r\n"), (431,)),
    Piece(in_chunks(EMBED, b"{}", end=CUT), (400,)),
    Piece(in_chunks(NOWHERE, b"{}", end=CUT), (404,)),
    Piece(in_chunks(DECODE, LINE, LINE, end=CUT, headers=["Content-Type: application/x-ndjson"]), (200,)),
    Piece(get("/models", CHUNKED) + CUT, (200,)),
    Piece(get("/livez", "Connection: close"), (200,)),
    Piece(request(EMBED, None, BYTES, "Connection: close"), (200,)),
    Piece(request(EMBED, None, BYTES, "Upgrade: h2c", "Connection: close, Upgrade"), (200,)),
    Piece(request(NOWHERE, b"{}" * 1000, "Connection: close"), (404,)),
    Piece(get("/livez", version="1.0"), (200,)),
    Piece(UPGRADE + CLOSE, (101,)),
    Piece(UPGRADE.replace(b"decode", b"none") + CLOSE, (404,)),
    Piece(UPGRADE.replace(b"13", b"8"), (426,)),
)
"""The server closes the connection after each of these."""


def draw(random: Generator) -> tuple[bytes, list[int]]:
    """Return a stream of a client, and the statuses of its responses. The server never answers its tail."""
    pieces = [GOOD[index] for index in random.integers(0, len(GOOD), random.integers(0, 6))]
    pieces.append(LAST[random.integers(0, len(LAST))])
    tail = b"".join(GOOD[index].sent for index in random.integers(0, len(GOOD), random.integers(0, 4)))
    if random.random() < 0.2:
        tail += bytes(2**18)  # more than the server reads before it closes
    return b"".join(piece.sent for piece in pieces) + tail, [status for piece in pieces for status in piece.statuses]


def cut(sent: bytes, places: Sequence[int]) -> list[bytes]:
    return [sent[begin:end] for begin, end in pairwise(sorted({0, len(sent), *places}))]


def ways_to_cut(sent: bytes, random: Generator) -> Iterator[list[bytes]]:
    """Yield the segments of a stream: whole, by heads and bodies, at random places, and byte by byte at its start."""
    yield [sent]
    yield cut(sent, [match.end() for match in re.finditer(rb"\r\n\r\n", sent)])
    yield cut(sent, [match.start() for match in re.finditer(rb"(POST|GET|HEAD) ", sent)])
    for count in (1, 3, 20):
        yield cut(sent, random.integers(0, len(sent), count).tolist())
    yield cut(sent, range(min(len(sent), 2500)))


VARYING = (
    (re.compile(rb"(date|x-request-id|server-timing): [^\r]*", re.IGNORECASE), rb"\1"),
    (re.compile(rb'"request_id":"[^"]*"'), b""),
    (re.compile(rb"content-length: \d+(?=\r\n.*problem\+json)", re.IGNORECASE | re.DOTALL), b""),
)
"""Parts of responses that differ between equal requests."""


async def answers(host: str, port: int, segments: Sequence[bytes]) -> bytes:
    """Send segments, each in a write of its own, and return the responses until the server closes the connection.

    Raises:
        ConnectionResetError: the server has reset the connection.

    """
    async with asyncio.timeout(TIMEOUT_SECONDS):
        reader, writer = await asyncio.open_connection(host, port)
        found = asyncio.create_task(reader.read())
        try:
            for segment in segments:
                writer.write(segment)
                await asyncio.sleep(0 if len(segments) > 100 else 0.003)
            content = await found
        finally:
            found.cancel()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
    for pattern, replacement in VARYING:
        content = pattern.sub(replacement, content)
    return content


def statuses(content: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", content)]


def generator(seed: int) -> Generator:
    return np.random.default_rng(seed)


BATCH = 10
"""Streams at a time."""


@pytest.fixture(scope="module")
def segment_server(tiny_repository: Path) -> Iterator[Server]:
    with serve(tiny_repository) as running:
        yield running


async def check(address: str, seed: int) -> None:
    """Send one stream in every way, each on a connection of its own."""
    url, random = httpx.URL(address), generator(seed)
    sent, expected = draw(random)
    whole = None
    for segments in ways_to_cut(sent, random):
        found = await answers(url.host, url.port or 80, segments)
        assert statuses(found) == expected, (seed, len(segments), found)
        whole = found if whole is None else whole
        assert found == whole, (seed, len(segments))


async def check_all(address: str, count: int) -> None:
    for begin in range(0, count, BATCH):
        async with asyncio.TaskGroup() as group:
            for seed in range(begin, begin + BATCH):
                group.create_task(check(address, seed))


def test_responses_are_equal_for_any_segmentation(segment_server: Server, long: bool) -> None:
    asyncio.run(check_all(segment_server.address, 6500 if long else 40))
