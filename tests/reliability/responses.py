"""Responses to bad requests, read to their end and checked."""

import asyncio
import re

from tritonclient.grpc import service_pb2

ANSWER_SECONDS = 60
PATIENCE_SECONDS = 0.3
"""Wait of a client before it closes its side: after a changed length, the server may wait for more."""
STATUS = re.compile(rb'(?:\AHTTP/1\.1 |"status": ?)(\d{3})')
"""Of an answer over HTTP, and of a problem document in it."""

NOT_IMPLEMENTED = 501
"""Status of a request with an unknown transfer encoding."""


class WrongAnswer(Exception):
    """An answer forbidden for every request."""


async def answer_or_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, bool]:
    """Return the status of the next answer, and whether it is the last: 0 where the server waits for more in vain."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            status, length = await head(reader)
    except TimeoutError:
        return worst(await everything(reader, writer, 0)), True
    async with asyncio.timeout(ANSWER_SECONDS):
        await body(reader, length)
    return status, False


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return status and body of the next answer."""
    status, length = await head(reader)
    return status, await body(reader, length)


async def head(reader: asyncio.StreamReader) -> tuple[int, int | None]:
    """Return the status of the next answer, and how many bytes its body has; None where it says so in the end."""
    lines = await reader.readuntil(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", lines)
    if not found:
        raise WrongAnswer(f"no HTTP: {lines!r}")
    length = re.search(rb"\r\ncontent-length: (\d+)\r\n", lines, re.IGNORECASE)
    return int(found[1]), None if length is None else int(length[1])


async def body(reader: asyncio.StreamReader, length: int | None) -> bytes:
    """Return the body of an answer."""
    return await (reader.readuntil(b"\r\n0\r\n\r\n") if length is None else reader.readexactly(length))


async def everything(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float) -> bytes:
    """Return all bytes until the server closes; after `patience` seconds the client closes its side."""
    parts = []

    async def read() -> None:
        while part := await reader.read(2**16):
            parts.append(part)

    try:
        async with asyncio.timeout(patience):
            await read()
    except TimeoutError:
        writer.write_eof()
        async with asyncio.timeout(ANSWER_SECONDS):
            await read()
    return b"".join(parts)


def is_fault(status: int) -> bool:
    """Return whether a status is the fault of the server."""
    return status >= 500 and status != NOT_IMPLEMENTED


def worst(answer: bytes) -> int:
    """Return the highest status in an answer or a part of it, including problem documents; 0 for none."""
    return max(map(int, STATUS.findall(answer)), default=0)


def refusal(answer: bytes) -> str:
    """Return the error of an answer of ModelStreamInfer; "" for vectors."""
    return str(service_pb2.ModelStreamInferResponse.FromString(answer).error_message)
