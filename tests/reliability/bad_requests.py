"""Bad requests without end, over every door: a change to a good one each, nobody knows which."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import httpx

from tests.conftest import Server
from tests.reliability.parsers import Parser
from tests.reliability.wires import UPGRADE, frame, memory, request

CONNECTIONS = 4
"""That send bad requests at a time, of each protocol."""
ANSWER_SECONDS = 60
PATIENCE_SECONDS = 0.3
"""After which a client says that nothing more will come: where a length was changed, the server may wait for more."""
BODIES = {
    "json": ("/models/gpt/embed", "application/json"),
    "npy": ("/models/gpt/embed", "application/x-npy"),
    "raw": ("/models/gpt/embed?shape=1,3", "application/octet-stream"),
    "safetensors": ("/models/bert/embed", "application/x-safetensors"),
    "v2": ("/v2/models/bert/infer", "application/octet-stream"),
}
MORE = (
    ("/v1/embeddings", {"model": "bert", "input": ["a b", "c"], "encoding_format": "float"}),
    ("/models/bert/embed", {"text": ["a b"], "return_tokens": True, "truncate": "right", "max_length": 3}),
    ("/models/bert/embed", {"input_ids": [[1, 2], [3]], "token_type_ids": [[0, 1], [0]], "pooling": "mean"}),
    ("/models/gpt/embed", {"input_ids": [[1], [2]], "offset": [0, 3], "encoding": "float", "dtype": "float16"}),
    ("/models/gpt/bias", {"query_length": 1, "key_length": 2}),
    ("/v2/models/gpt/infer", {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}]}),
    ("/v2/repository/index", {"ready": True}),
)
WORDS = (b"null", b"-1", b"1e9", b"[[]]", b'"', b"{", b"\xff", b"\0", b"9" * 25, b"true", b"%00", b"\r\n", b": ", b",")
GRPC_MAY = {
    code
    for code in grpc.StatusCode
    if code.name in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION")
}
HTTP_KINDS = ("body", "body", "body", "more", "more", "more", "head")


class Wrong(Exception):
    """An answer that no request may get."""


@dataclass
class Seen:
    """What was answered, by door and status, and the server's own memory by the number of answers."""

    answers: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.answers.values())


def change(draw: random.Random, data: bytes, words: tuple[bytes, ...] = ()) -> bytes:
    """Return other bytes than `data`, not far from it."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
        end = min(end, at + draw.choice((0, 1, 2, 8)))
        new = (draw.choice((*WORDS, *words)), draw.randbytes(draw.randint(0, 8)), b"", data[at:end] * 2)
        data = data[:at] + draw.choice(new) + data[end:]
    return data


class Bad:
    """Sends bad requests to a server, and a good one after every hundredth.

    Args:
        server: that serves the tiny models.
        parsers: whose inputs are changed.
        expected: the answer to the good request.

    """

    def __init__(self, server: Server, parsers: dict[str, Parser], expected: bytes) -> None:
        url = httpx.URL(server.address)
        self._host, self._port, self._grpc = url.host, int(url.port or 0), server.grpc
        self._pid, self._parsers, self._expected = server.process.pid, parsers, expected
        self.seen = Seen()

    async def run(self, count: int, seed: int = 0) -> Seen:
        """Send until `count` are answered.

        Raises:
            Wrong: an answer is one that no request may get, or a good request did not get the right one.
            TimeoutError: a request got none.

        """
        begin = time.perf_counter()
        doors: tuple[Callable[[random.Random, int], Coroutine[None, None, None]], ...] = (
            self._http,
            self._web_socket,
            self._calls,
        )
        async with asyncio.TaskGroup() as group:
            for number in range(CONNECTIONS):
                for index, door in enumerate(doors):
                    group.create_task(door(random.Random(seed + 100 * number + index), count))
        self.seen.seconds = time.perf_counter() - begin
        return self.seen

    def _count(self, door: str, status: object) -> None:
        self.seen.answers[f"{door} {status}"] += 1
        if self.seen.count % 500 == 0:
            self.seen.memory.append(memory(self._pid))

    def _bad(self, draw: random.Random) -> bytes:
        """Return bytes that may still be a request."""
        kind = draw.choice(HTTP_KINDS)
        if kind == "body":
            name = draw.choice(tuple(BODIES))
            path, media = BODIES[name]
            parser = self._parsers[name]
            body, headers = change(draw, draw.choice(parser.seeds), parser.words), [f"Content-Type: {media}"]
            if name == "v2":
                length, body = int.from_bytes(body[:2], "little"), body[2:]
                headers = ["Content-Type: application/octet-stream", f"Inference-Header-Content-Length: {length}"]
            return request(path, body, *headers)
        path, document = draw.choice(MORE)
        body = json.dumps(document).encode()
        if kind == "more":
            return request(path, change(draw, body), "Content-Type: application/json")
        head, _, body = request(path, body, "Content-Type: application/json").partition(b"\r\n\r\n")
        return change(draw, head) + b"\r\n\r\n" + body

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect while a block runs, which ends when the server closes."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                yield reader, writer
        finally:
            writer.transport.abort()

    async def _http(self, draw: random.Random, count: int) -> None:
        while self.seen.count < count:
            async with self._open() as (reader, writer):
                for _ in range(100):
                    sent = self._bad(draw)
                    writer.write(sent)
                    status, over = await answer_or_end(reader, writer)
                    if status >= 500:
                        raise Wrong(f"{sent!r}: {status}")
                    self._count("http", status)
                    if over or status == 400:
                        break
            await self._good()

    async def _good(self) -> None:
        got: object = None
        async with self._open() as (reader, writer):
            writer.write(request("/models/gpt/embed", None, "Accept: application/octet-stream"))
            async with asyncio.timeout(ANSWER_SECONDS):
                got = await answer(reader)
        if got != (200, self._expected):
            raise Wrong(f"a good request: {got}")

    async def _web_socket(self, draw: random.Random, count: int) -> None:
        frames, texts = self._parsers["frames"], (b'{"input_ids": [1]}', b'{"rewind": 0}', b'{"open": {"offset": 1}}')
        while self.seen.count < count:
            async with self._open() as (reader, writer):
                writer.write(UPGRADE)
                await reader.readuntil(b"\r\n\r\n")
                for _ in range(100):
                    if draw.random() < 0.5:
                        sent = frame(2, change(draw, draw.choice(frames.seeds)))
                    else:
                        sent = frame(1, change(draw, draw.choice(texts)))
                    if broken := draw.random() < 0.02:
                        sent = change(draw, sent)
                    writer.write(sent)
                    if broken:  # its length may have changed, and the rest of it be waited for
                        writer.write_eof()
                    # asyncio.wait_for of Python 3.11 forgets now and then that it was cancelled, and would go on.
                    async with asyncio.timeout(ANSWER_SECONDS):
                        code = await message(reader)
                    if code in (1011, 1012) or 500 <= code < 600:
                        raise Wrong(f"{sent!r}: {code}")
                    self._count("socket", code)
                    if code >= 1000 or broken:
                        break

    async def _calls(self, draw: random.Random, count: int) -> None:
        parser = self._parsers["protobuf"]
        async with grpc.aio.insecure_channel(self._grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            while self.seen.count < count:
                sent = change(draw, draw.choice(parser.seeds), (b"gpt", b"INT64"))
                code = grpc.StatusCode.OK
                try:
                    await call(sent, timeout=ANSWER_SECONDS)
                except grpc.aio.AioRpcError as error:
                    code = error.code()
                if code not in GRPC_MAY:
                    raise Wrong(f"{sent!r}: {code}")
                self._count("grpc", code.name)


async def answer_or_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, bool]:
    """Return the status of the next answer, and whether it is the last: 0 where the server waits for more in vain."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return (await answer(reader))[0], False
    except TimeoutError:
        writer.write_eof()
        async with asyncio.timeout(ANSWER_SECONDS):
            rest = await reader.read()
        found = re.match(rb"HTTP/1\.1 (\d+)", rest)
        return (int(found[1]) if found else 0), True


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return status and body of the next answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
    if not found:
        raise Wrong(f"no HTTP: {head!r}")
    length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head, re.IGNORECASE)
    if length is None:
        return int(found[1]), await reader.readuntil(b"\r\n0\r\n\r\n")
    return int(found[1]), await reader.readexactly(int(length[1]))


async def message(reader: asyncio.StreamReader) -> int:
    """Read the next message of a WebSocket, and return the code with which it was closed, its status, or 0."""
    while True:
        kind, size = await reader.readexactly(2)
        if size == 126:
            size = int.from_bytes(await reader.readexactly(2), "big")
        content = await reader.readexactly(size)
        if kind & 15 == 8:
            return int.from_bytes(content[:2], "big")
        if kind & 15 in (1, 2):
            status = re.search(rb'"status": ?(\d{3})', content)  # of a problem document, in text or in a frame
            return int(status[1]) if status else 0
