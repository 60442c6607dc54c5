"""Random changes of good requests, over every protocol: no 5xx, no hang, and good ones among them get the right bits.

`make reliability` sends a million.
"""

import asyncio
import json
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.reliability.load import asking_meanwhile
from tests.reliability.parsers import Parser, parsers
from tests.reliability.wires import UPGRADE, frame, memory, request
from tests.support.artifacts import copy_artifact
from tests.support.open_inference import infer_message
from tests.support.servers import Server, serve

ANSWER_SECONDS = 60
PATIENCE_SECONDS = 0.3
"""Wait of a client before it closes its side: after a changed length, the server may wait for more."""
STATUSES = re.compile(rb'(?:\AHTTP/1\.1 |"status": ?)(\d{3})')
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
        await (reader.readuntil(b"\r\n0\r\n\r\n") if length is None else reader.readexactly(length))
    return status, False


async def head(reader: asyncio.StreamReader) -> tuple[int, int | None]:
    """Return the status of the next answer, and how many bytes its body has; None where it says so in the end."""
    lines = await reader.readuntil(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", lines)
    if not found:
        raise WrongAnswer(f"no HTTP: {lines!r}")
    length = re.search(rb"\r\ncontent-length: (\d+)\r\n", lines, re.IGNORECASE)
    return int(found[1]), None if length is None else int(length[1])


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
    return max(map(int, STATUSES.findall(answer)), default=0)


def refusal(answer: bytes) -> str:
    """Return the error of an answer of ModelStreamInfer; "" for vectors."""
    return str(service_pb2.ModelStreamInferResponse.FromString(answer).error_message)


BODIES = {
    "json": ("/models/gpt/embed", "application/json"),
    "npy": ("/models/gpt/embed", "application/x-npy"),
    "raw": ("/models/gpt/embed?shape=1,3", "application/octet-stream"),
    "safetensors": ("/models/bert/embed", "application/x-safetensors"),
    "v2": ("/v2/models/bert/infer", "application/octet-stream"),
    "stem": ("/v2/models/vit/infer", "application/octet-stream"),
}
MORE: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/embeddings", {"model": "bert", "input": ["a b", "c"], "encoding_format": "float", "pooling": "mean"}),
    ("/models/bert/embed", {"text": ["a b"], "return_tokens": True, "truncate": "right", "max_length": 3}),
    ("/models/bert/embed", {"input_ids": [[1, 2], [3]], "token_type_ids": [[0, 1], [0]], "dtype": "bfloat16"}),
    ("/models/gpt/embed", {"input_ids": [[1], [2]], "offset": [0, 3], "encoding": "float", "dtype": "float16"}),
    ("/models/spare/embed", {"input_ids": [1, 2, 3]}),
    (
        "/models/gpt/embed",
        {
            "parts": [[{"input_ids": [1, 9]}, {"vectors": "AACAPwAAgD8AAIA/AACAPw=="}], [{"input_ids": [2]}]],
            "placeholder": {"token_id": 9, "vectors": "AACAPwAAgD8AAIA/AACAPw=="},
        },
    ),
    ("/models/alibi/bias", {"query_length": 1, "key_length": 2}),
    ("/v2/models/gpt/infer", {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}]}),
    ("/v2/repository/index", {"ready": True}),
    ("/v2/repository/models/spare/load", {"parameters": {}}),
    ("/v2/repository/models/spare/unload", {"parameters": {"unload_dependents": True}}),
)
PATHS = {path.partition("?")[0] for path, _ in (*BODIES.values(), *MORE)}
STEPS = (
    b'{"input_ids": [1, 2]}',
    b'{"input_ids": [[1], [2]], "offset": [1, 2]}',
    b'{"parts": [{"input_ids": [1]}, {"vectors": "AACAPwAAgD8AAIA/AACAPw=="}]}',
    b'{"append": [1]}',
    b'{"reorder": [0, 0]}',
    b'{"drop": [1]}',
    b'{"rewind": 0}',
    b'{"ping": true}',
)
LISTS = (
    {"input_ids": [1, 2, 3, 4, 5], "chunk": 2},
    {"input_ids": [[1, 2], [3]], "offset": [0, 3], "encoding": "float", "dtype": "bfloat16"},
    {"parts": [[{"input_ids": [1]}, {"vectors": "AACAPwAAgD8AAIA/AACAPw=="}], [{"input_ids": [2]}]], "chunk": 1},
    {"input_ids": [1, 2, 3], "offset": 4},  # one more than there are positions
)
"""Lists of ids, answered as events."""
METHODS = {
    "ServerLive": service_pb2.ServerLiveRequest(),
    "ServerReady": service_pb2.ServerReadyRequest(),
    "ServerMetadata": service_pb2.ServerMetadataRequest(),
    "ModelReady": service_pb2.ModelReadyRequest(name="bert", version="1"),
    "ModelMetadata": service_pb2.ModelMetadataRequest(name="vit"),
    "ModelConfig": service_pb2.ModelConfigRequest(name="gpt", version="1"),
    "ModelStatistics": service_pb2.ModelStatisticsRequest(name="bert", version="2"),
    "RepositoryIndex": service_pb2.RepositoryIndexRequest(ready=True),
    "RepositoryModelLoad": service_pb2.RepositoryModelLoadRequest(model_name="spare"),
    "RepositoryModelUnload": service_pb2.RepositoryModelUnloadRequest(model_name="spare"),
}
"""Methods of gRPC except those for inference, each with a good request."""


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


def change(draw: random.Random, data: bytes, words: tuple[bytes, ...] = ()) -> bytes:
    """Return bytes not far from `data`, and now and then itself."""
    for _ in range(draw.choice((0, 1, 1, 1, 1, 2, 2, 4))):
        at, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
        end = min(end, at + draw.choice((0, 1, 2, 8)))
        new = (draw.choice((*WORDS, *words)), draw.randbytes(draw.randint(0, 8)), b"", data[at:end] * 2)
        data = data[:at] + draw.choice(new) + data[end:]
    return data


def infers() -> list[bytes]:
    """Return messages ModelInferRequest of an image, as raw bytes and as numbers, and of the start of a sequence."""
    raw, typed = (service_pb2.ModelInferRequest(model_name="vit") for _ in range(2))
    for image in (raw, typed):
        image.inputs.add(name="pixel_values", datatype="FP32", shape=[1, 1, 2, 2])
    raw.raw_input_contents.append(bytes(16))
    typed.inputs[0].contents.fp32_contents.extend([0.5] * 4)
    sequence = infer_message([[0]])
    sequence.parameters["sequence_id"].int64_param = 5
    sequence.parameters["sequence_start"].bool_param = True
    return [message.SerializeToString() for message in (raw, typed, sequence)]


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
    """Sends bad requests to a server.

    Args:
        server: with the tiny models, a stem `vit`, `alibi` with a bias, and `spare`, loaded and unloaded by requests.
        parsers: source of inputs to change.

    Attributes:
        answers: their number by protocol and status.
        memory: of the server, every 500 answers.

    """

    def __init__(self, server: Server, parsers: dict[str, Parser]) -> None:
        url = httpx.URL(server.address)
        self._host, self._port, self._grpc = url.host, int(url.port or 0), server.grpc
        self._pid, self._parsers = server.pid, parsers
        self._infers = (*parsers["protobuf"].seeds, *infers())
        self.answers: Counter[str] = Counter()
        self.memory: list[int] = []

    async def run(self, count: int, seed: int = 0) -> None:
        """Send until `count` are answered.

        Raises:
            WrongAnswer: an answer is forbidden.
            TimeoutError: a request got none.

        """
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

    def _count(self, protocol: str, status: object) -> None:
        self.answers[f"{protocol} {status}"] += 1
        if self.answers.total() % 500 == 0:
            self.memory.append(memory(self._pid))

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
        while self.answers.total() < count:
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

    async def _streams(self, draw: random.Random, count: int) -> None:
        while self.answers.total() < count:
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
        while self.answers.total() < count:
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
            while self.answers.total() < count:
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
            while self.answers.total() < count:
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


GROWTH = 16 * 2**20
"""Limit of the server's memory growth in the second half, in bytes."""


@pytest.fixture(scope="module")
def reject_server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve also a stem, a model with a bias, and a spare one to load and unload."""
    repository = shutil.copytree(tiny_repository, tmp_path_factory.mktemp("every") / "repository")
    shutil.copytree(repository / "gpt", repository / "spare")
    copy_artifact("alibi", repository)
    copy_artifact("vit-gray", repository, "vit")
    with serve(repository, "--model-control", "explicit", "--load-model", "*") as running:
        assert httpx.get(f"{running.address}/readyz", timeout=60).status_code == 200
        yield running


@pytest.mark.timeout(14_400)
def test_bad_requests_do_not_affect_good_requests(
    reject_server: Server,
    good_answer: bytes,
    tmp_path: Path,
    long: bool,
    record_property: Callable[[str, object], None],
) -> None:
    bad, begin = Bad(reject_server, parsers(tmp_path)), time.perf_counter()
    with asking_meanwhile(reject_server, good_answer):
        asyncio.run(bad.run(1_000_000 if long else 6000))
    record_property("answers", dict(bad.answers))
    record_property("a second", bad.answers.total() / (time.perf_counter() - begin))
    half = len(bad.memory) // 2
    assert max(bad.memory[half:]) - max(bad.memory[:half]) < GROWTH
    reached = {protocol for protocol, status in map(str.split, bad.answers) if status in ("200", "0", "OK")}
    assert reached == {*PATHS, "lines", "events", "socket", *METHODS, "ModelInfer", "ModelStreamInfer"}
