"""The protocols of decode streams, with one interface for messages and answers."""

import asyncio
import base64
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from websockets.asyncio.client import ClientConnection, connect

import preblock
from benchmarks.soak.common import PATIENCE, SoakFailure, Vectors
from preblock.client.errors import ServiceError
from preblock.client.messages import ERROR, read_frame, write_move, write_step
from preblock.client.token_ids import read_rows

MOVES = {"rewind": 4, "reorder": 5, "append": 6, "drop": 7, "ping": 8}


@dataclass
class StepAnswer:
    """An answer: offsets of the rows, vectors (T, D) of a step, or the text of an error."""

    offset: list[int] = field(default_factory=list)
    vectors: Vectors | None = None
    refused: str = ""


Message = dict[str, Any] | bytes
"""A message in the fields of its JSON form, or invalid bytes."""


class Frames:
    """A WebSocket with binary frames."""

    name = "frames"
    garbage: tuple[bytes, ...] = (
        b"",
        b"PRBK",
        b"XXXX" + bytes(20),
        b"PRBK\2\x05" + bytes(18) + b"\1",
        b"PRBK\2\xee" + bytes(18),
    )

    def __init__(self, address: str, model: str) -> None:
        self._address = f"{address.replace('http', 'ws', 1)}/models/{model}/decode?rows=0"
        self._socket: ClientConnection | None = None
        self.number = 0

    async def open(self, offset: list[int]) -> None:
        """Connect, and add rows at `offset`."""
        await self.leave()
        self._socket = await connect(self._address, compression=None, max_size=None, close_timeout=1)
        self.number = 0
        await self.ask({"append": offset}, 0)

    async def leave(self) -> None:
        """Abort the connection."""
        if self._socket is not None:
            self._socket.transport.abort()
            await self._socket.wait_closed()
            self._socket = None

    async def ask(self, message: Message, number: int) -> StepAnswer:
        """Send a message with its number, or 0 for none, and return the answer."""
        assert self._socket is not None
        self.number = max(self.number, number)
        await self._socket.send(self.write(message, number))
        return self.read(await self._socket.recv())

    def write(self, message: Message, number: int) -> bytes | str:
        """Return a message as a frame."""
        if isinstance(message, bytes):
            return message
        if "input_ids" not in message:
            ((name, integers),) = message.items()
            listed = np.array([] if integers is True else integers, np.int64)
            return write_move(MOVES[name], listed, number)
        values, lengths = read_rows("input_ids", message["input_ids"])
        parts = {"input_ids": values}
        if "position_ids" in message:
            parts["position_ids"] = read_rows("position_ids", message["position_ids"])[0]
        return write_step(parts, lengths, number, message.get("offset", []), [])

    def read(self, answer: bytes | str) -> StepAnswer:
        """Read the frame of an answer."""
        assert isinstance(answer, bytes)
        found = read_frame(answer)
        if found.kind == ERROR:
            return StepAnswer(refused=str(found.text))
        return StepAnswer(
            found.offset, found.tensors[0].reshape(-1, found.tensors[0].shape[-1]) if found.tensors else None
        )


class Texts(Frames):
    """A WebSocket with JSON messages."""

    name = "text"
    garbage: tuple[bytes, ...] = (
        b"",
        b"{",
        b"[]",
        b'{"nope": 1}',
        b'{"rewind": "x"}',
        b'{"ping": false}',
        b'{"step": -1, "ping": true}',
    )

    def write(self, message: Message, number: int) -> bytes | str:
        """Return a message as JSON."""
        if isinstance(message, bytes):
            return message.decode()
        return json.dumps(message | ({"step": number} if number else {}))

    def read(self, answer: bytes | str) -> StepAnswer:
        """Read the JSON of an answer."""
        return told(json.loads(answer))


class Lines(Texts):
    """NDJSON lines over HTTP."""

    name = "lines"
    garbage: tuple[bytes, ...] = Texts.garbage[1:]

    def __init__(self, address: str, model: str) -> None:
        self._host = httpx.URL(address)
        self._path = f"/models/{model}/decode?rows=0"
        self._writer: asyncio.StreamWriter | None = None
        self.number = 0

    async def open(self, offset: list[int]) -> None:
        """Begin a request, and add rows at `offset`."""
        await self.leave()
        self._reader, self._writer = await asyncio.open_connection(self._host.host, self._host.port)
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        self._writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        answered = await self._reader.readuntil(b"\r\n\r\n")
        if not answered.startswith(b"HTTP/1.1 200 "):
            raise SoakFailure(answered)
        self.number = 0
        await self.ask({"append": offset}, 0)

    async def leave(self) -> None:
        """Abort the connection."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    async def ask(self, message: Message, number: int) -> StepAnswer:
        """Send a line, and return the answer."""
        assert self._writer is not None
        self.number = max(self.number, number)
        line = self.write(message, number)
        assert isinstance(line, str)
        self._writer.write(b"%x\r\n%b\n\r\n" % (len(line) + 1, line.encode()))
        size = int(await self._reader.readline() or b"0", 16)
        answer = await self._reader.readexactly(size + 2)
        if not size:
            raise EOFError
        return self.read(answer.decode())


def told(document: Any) -> StepAnswer:
    """Read an answer in JSON."""
    if "error" in document:
        return StepAnswer(refused=str(document["error"]))
    if "embeddings" not in document:
        return StepAnswer(document["next_offset"])
    flat = np.frombuffer(base64.b64decode(document["embeddings"]), "<f4")
    return StepAnswer(document["next_offset"], flat.reshape(-1, document["shape"][-1]))


class ClientStreams:
    """The client of Preblock, with automatic resume."""

    name = "client"
    garbage: tuple[bytes, ...] = ()

    def __init__(self, address: str, model: str) -> None:
        self._client = preblock.connect_async(address, timeout=PATIENCE, retries=8)
        self._model = model
        self._context: Any = None
        self.number = 0

    async def open(self, offset: list[int]) -> None:
        """Open a stream with rows at `offset`."""
        await self.leave()
        context = self._client.decode(self._model, offset=offset, resume=True)
        self._stream = await context.__aenter__()
        self._context = context

    async def leave(self) -> None:
        """Close the stream."""
        if self._context is not None:
            await self._context.__aexit__(None, None, None)
            self._context = None

    async def ask(self, message: Message, number: int) -> StepAnswer:  # noqa: ARG002 - the client numbers messages
        """Call the method of a message, and return its result."""
        assert isinstance(message, dict)
        stream, vectors = self._stream, None
        try:
            if "input_ids" in message:
                vectors = await stream.step(message["input_ids"], position_ids=message.get("position_ids"))
                vectors = vectors.reshape(-1, vectors.shape[-1])
            else:
                ((name, integers),) = message.items()
                await getattr(stream, name)(*([] if integers is True else [integers]))
        except ServiceError as error:
            return StepAnswer(refused=str(error))
        return StepAnswer(stream.offset, vectors)
