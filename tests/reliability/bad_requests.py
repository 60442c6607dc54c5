"""Endless bad requests over every protocol, each a random change of a good one."""

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
from tritonclient.grpc import service_pb2

from tests.reliability.good_requests import BODIES, LISTS, METHODS, MORE, STEPS
from tests.reliability.parsers import Parser
from tests.reliability.responses import (
    ANSWER_SECONDS,
    NOT_IMPLEMENTED,
    PATIENCE_SECONDS,
    WrongAnswer,
    answer,
    answer_or_end,
    everything,
    is_fault,
    refusal,
    worst,
)
from tests.reliability.wires import UPGRADE, frame, memory, request
from tests.support.servers import Server

SERVICE = "/inference.GRPCInferenceService"
WORDS = (b"null", b"-1", b"1e9", b"[[]]", b'"', b"{", b"\xff", b"\0", b"9" * 25, b"true", b"%00", b"\r\n", b": ", b",")
GRPC_MAY = {
    code
    for code in grpc.StatusCode
    if code.name in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED")
}
HTTP_KINDS = ("body", "body", "body", "more", "more", "more", "head")
REFUSAL = re.compile(
    r"(message|model|version|inputs|outputs|parameters|raw_input_contents|"
    r"input_ids|token_type_ids|position_ids|attention_mask|offset|pixel_values)(\[\d+\]|\.\w+)*: got "
    r"|parameters\.sequence_id .* does not run on "
)
"""Begin of an error about the request; within a gRPC stream, an error has no status."""


@dataclass
class Seen:
    """Number of answers by protocol and status, and the server's memory every 500 answers."""

    answers: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.answers.values())


def change(draw: random.Random, data: bytes, words: tuple[bytes, ...] = ()) -> bytes:
    """Return bytes not far from `data`, and now and then itself."""
    for _ in range(draw.choice((0, 1, 1, 1, 1, 2, 2, 4))):
        at, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
        end = min(end, at + draw.choice((0, 1, 2, 8)))
        new = (draw.choice((*WORDS, *words)), draw.randbytes(draw.randint(0, 8)), b"", data[at:end] * 2)
        data = data[:at] + draw.choice(new) + data[end:]
    return data


def images() -> list[bytes]:
    """Return messages ModelInferRequest of an image: as raw bytes, and as fp32_contents."""
    raw, typed = (service_pb2.ModelInferRequest(model_name="vit") for _ in range(2))
    for message in (raw, typed):
        message.inputs.add(name="pixel_values", datatype="FP32", shape=[1, 1, 2, 2])
    raw.raw_input_contents.append(bytes(16))
    typed.inputs[0].contents.fp32_contents.extend([0.5] * 4)
    return [raw.SerializeToString(), typed.SerializeToString()]


def sequence() -> bytes:
    """Return the ModelInferRequest at the start of a sequence."""
    message = service_pb2.ModelInferRequest(model_name="gpt", raw_input_contents=[bytes(8)])
    message.inputs.add(name="input_ids", datatype="INT64", shape=[1, 1])
    message.parameters["sequence_id"].int64_param = 5
    message.parameters["sequence_start"].bool_param = True
    serialized: bytes = message.SerializeToString()
    return serialized


def stream(draw: random.Random) -> tuple[str, bytes]:
    """Return a bad request for a stream over HTTP, and whether it is one of lines or of events."""
    path = "/models/gpt/decode" + draw.choice(("", "", "?rows=2", "?offset=[1]"))
    if draw.random() < 0.5:
        body = change(draw, json.dumps(draw.choice(LISTS)).encode())
        return "events", request(path, body, "Accept: text/event-stream", "Connection: close")
    lines = [draw.choice(STEPS) for _ in range(draw.randint(1, 5))]
    lines = [change(draw, line) if draw.random() < 0.5 else line for line in lines]
    body = b"".join(b"%x\r\n%b\n\r\n" % (len(line) + 1, line) for line in lines) + b"0\r\n\r\n"
    headers = ("Content-Type: application/x-ndjson", "Transfer-Encoding: chunked", "Connection: close")
    return "lines", request(path, body, *headers)


class Bad:
    """Sends bad requests to a server, and a good one after every hundredth.

    Args:
        server: with the tiny models, a stem `vit`, `alibi` with a bias, and `spare`, loaded and unloaded by requests.
        parsers: source of inputs to change.
        expected: the answer to the good request.

    """

    def __init__(self, server: Server, parsers: dict[str, Parser], expected: bytes) -> None:
        url = httpx.URL(server.address)
        self._host, self._port, self._grpc = url.host, int(url.port or 0), server.grpc
        self._pid, self._parsers, self._expected = server.pid, parsers, expected
        self._infers = (*parsers["protobuf"].seeds, *images(), sequence())
        self.seen = Seen()

    async def run(self, count: int, seed: int = 0) -> Seen:
        """Send until `count` are answered.

        Raises:
            WrongAnswer: an answer is forbidden, or the answer to a good request is wrong.
            TimeoutError: a request got none.

        """
        begin = time.perf_counter()
        # How many send at a time: more where requests are often waited for in vain, so that each protocol has its
        # share.
        protocols: dict[Callable[[random.Random, int], Coroutine[None, None, None]], int] = {
            self._http: 12,
            self._streams: 8,
            self._web_socket: 2,
            self._calls: 4,
            self._messages: 1,
        }
        async with asyncio.TaskGroup() as group:
            for index, (protocol, senders) in enumerate(protocols.items()):
                for number in range(senders):
                    group.create_task(protocol(random.Random(seed + 100 * number + index), count))
        self.seen.seconds = time.perf_counter() - begin
        return self.seen

    def _count(self, protocol: str, status: object) -> None:
        self.seen.answers[f"{protocol} {status}"] += 1
        if self.seen.count % 500 == 0:
            self.seen.memory.append(memory(self._pid))

    def _bad(self, draw: random.Random) -> tuple[str, bytes]:
        """Return changed bytes of a request, and the path of the good one."""
        kind = draw.choice(HTTP_KINDS)
        if kind == "body":
            name = draw.choice(tuple(BODIES))
            path, media = BODIES[name]
            parser = self._parsers[name]
            body, headers = change(draw, draw.choice(parser.seeds), parser.words), [f"Content-Type: {media}"]
            if name in ("v2", "stem"):
                length, body = int.from_bytes(body[:2], "little"), body[2:]
                if length != 0xFFFF:
                    headers.append(f"Inference-Header-Content-Length: {length}")
            return path.partition("?")[0], request(path, body, *headers)
        path, document = draw.choice(MORE)
        body = json.dumps(document).encode()
        if kind == "more":
            return path, request(path, change(draw, body), "Content-Type: application/json")
        head, _, body = request(path, body, "Content-Type: application/json").partition(b"\r\n\r\n")
        return path, change(draw, head) + b"\r\n\r\n" + body

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect during a block; the end of the connection ends the block."""
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
                    path, sent = self._bad(draw)
                    writer.write(sent)
                    status, over = await answer_or_end(reader, writer)
                    if is_fault(status):
                        raise WrongAnswer(f"{sent!r}: {status}")
                    self._count(path, status)
                    if over or status in (400, NOT_IMPLEMENTED):
                        break
            await self._good()

    async def _good(self) -> None:
        got: object = None
        async with self._open() as (reader, writer):
            writer.write(request("/models/gpt/embed", None, "Accept: application/octet-stream"))
            async with asyncio.timeout(ANSWER_SECONDS):
                got = await answer(reader)
        if got != (200, self._expected):
            raise WrongAnswer(f"a good request: {got}")

    async def _streams(self, draw: random.Random, count: int) -> None:
        while self.seen.count < count:
            protocol, sent = stream(draw)
            if broken := draw.random() < 0.2:
                sent = change(draw, sent)
            async with self._open() as (reader, writer):
                writer.write(sent)
                got = await everything(reader, writer, PATIENCE_SECONDS if broken else ANSWER_SECONDS)
                status = worst(got)
                if is_fault(status) or not (broken or got.endswith((b"}", b"\r\n0\r\n\r\n"))):
                    raise WrongAnswer(f"{sent!r}: {got!r}")
                self._count(protocol, status)

    async def _web_socket(self, draw: random.Random, count: int) -> None:
        frames, texts = self._parsers["frames"], (*STEPS, b'{"open": {"offset": 1}}')
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
                    # asyncio.wait_for of Python 3.11 sometimes loses a cancellation, and would go on.
                    async with asyncio.timeout(ANSWER_SECONDS):
                        code = await message(reader)
                    if code in (1011, 1012) or 500 <= code < 600:
                        raise WrongAnswer(f"{sent!r}: {code}")
                    self._count("socket", code)
                    if code >= 1000 or broken:
                        break

    def _infer(self, draw: random.Random) -> bytes:
        return change(draw, draw.choice(self._infers), (b"gpt", b"vit", b"INT64", b"FP32"))

    def _channel(self) -> grpc.aio.Channel:
        """Return a connection of its own."""
        return grpc.aio.insecure_channel(self._grpc, [("grpc.use_local_subchannel_pool", 1)])

    async def _calls(self, draw: random.Random, count: int) -> None:
        async with self._channel() as channel:
            while self.seen.count < count:
                method, sent = "ModelInfer", self._infer(draw)
                if draw.random() < 0.5:
                    method = draw.choice(tuple(METHODS))
                    sent = change(draw, METHODS[method].SerializeToString())
                code = grpc.StatusCode.OK
                try:
                    await channel.unary_unary(f"{SERVICE}/{method}")(sent, timeout=ANSWER_SECONDS)
                except grpc.aio.AioRpcError as error:
                    code = error.code()
                if code not in GRPC_MAY:
                    raise WrongAnswer(f"{method} {sent!r}: {code}")
                self._count(method, code.name)

    async def _messages(self, draw: random.Random, count: int) -> None:
        async with self._channel() as channel:
            while self.seen.count < count:
                call = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")()
                for _ in range(100):
                    sent = self._infer(draw)
                    try:
                        await call.write(sent)
                        async with asyncio.timeout(ANSWER_SECONDS):
                            told = refusal(await call.read())
                    except grpc.aio.AioRpcError as error:
                        raise WrongAnswer(f"{sent!r}: {error.code()}") from error
                    if told and not REFUSAL.match(told):
                        raise WrongAnswer(f"{sent!r}: {told}")
                    self._count("ModelStreamInfer", "REFUSED" if told else "OK")
                await call.done_writing()
                if await call.code() is not grpc.StatusCode.OK:
                    raise WrongAnswer(f"the end of a stream: {await call.code()}")


async def message(reader: asyncio.StreamReader) -> int:
    """Read the next message of a WebSocket, and return its close code, its status, or 0."""
    while True:
        kind, size = await reader.readexactly(2)
        if size == 126:
            size = int.from_bytes(await reader.readexactly(2), "big")
        content = await reader.readexactly(size)
        if kind & 15 == 8:
            return int.from_bytes(content[:2], "big")
        if kind & 15 in (1, 2):
            return worst(content)  # of a problem document, in text or in a frame
