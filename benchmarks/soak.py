"""Many streams over every door, fed at random and broken at random: every bit is checked, memory must stay flat.

    python -m benchmarks.soak                      # a million steps of gpt2-small in model_repository
    python -m benchmarks.soak --steps 100000 --seed 7

Linux only. Starts a server of its own. Between it and the streams stands a proxy that cuts each connection after a
random number of bytes, be it in a handshake, a message or an answer; a stream then goes on elsewhere at its last
offsets. Rows are rewound, reordered, added and dropped, messages are repeated, and some are broken or not allowed: they
must change nothing. Vectors are compared with the tables of the artifact, read and added by numpy; so it must be one of
tokens and learned positions alone. Exits with 1 where a bit is wrong, an answer takes longer than 60 seconds, a stream
stays open, or the server's own memory grows by more than 2 MiB from the third quarter of the steps to the fourth, peak
to peak.
"""

import argparse
import asyncio
import base64
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import onnx
from numpy.typing import NDArray
from websockets import ConnectionClosed, WebSocketException
from websockets.asyncio.client import ClientConnection, connect

import incipit
from incipit.client.errors import NoAnswer, ServiceError
from incipit.client.frames import ERROR, Answer, Move, Step, read_frame, write_frame
from incipit.client.rows import read_rows

T = TypeVar("T")
Vectors = NDArray[np.float32]
PATIENCE = 60.0
"""Seconds after which an answer counts as hung."""
LIFE = 400_000
"""Bytes that a connection lives, on average."""
MOST_ROWS, LONGEST = 5, 4
GROWTH = 2 * 2**20
MOVES = {"rewind": 4, "reorder": 5, "append": 6, "drop": 7, "ping": 8}
BROKEN = (OSError, EOFError, WebSocketException, NoAnswer, httpx.TransportError)


class Wrong(Exception):
    """The server answered what it must not."""


class Truth:
    """The vectors of tokens at positions, from the files of an artifact.

    Args:
        folder: of the artifact, whose front-end adds a row of a table of tokens and a row of one of positions.

    """

    def __init__(self, folder: Path) -> None:
        graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
        tables = [tensor for tensor in graph.initializer if tensor.external_data]
        names = {tensor.name: self._table(folder, tensor) for tensor in tables}
        self.tokens, self.positions = (names[f"frontend.{table}.weight"] for table in ("tokens", "positions"))
        if len(names) > 2 or {table.dtype.name for table in names.values()} != {"float32"}:
            raise SystemExit(f"{folder}: got the tables {', '.join(names)}, allowed tokens and positions in float32")

    @staticmethod
    def _table(folder: Path, tensor: Any) -> Vectors:
        place = {entry.key: entry.value for entry in tensor.external_data}
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return np.memmap(folder / place["location"], kind, "r", int(place["offset"]), tuple(tensor.dims))

    def vectors(self, ids: list[list[int]], positions: list[list[int]]) -> Vectors:
        """Return the vectors (T, D) of rows of ids, at as many position indices."""
        flat = [np.array([value for row in rows for value in row], np.int64) for rows in (ids, positions)]
        return self.tokens[flat[0]] + self.positions[flat[1]]


@dataclass
class Told:
    """What came back: the offsets of the rows, and of a step the vectors (T, D); or why it was refused."""

    offset: list[int] = field(default_factory=list)
    vectors: Vectors | None = None
    refused: str = ""


Message = dict[str, Any] | bytes
"""As JSON has it, or bytes that are no message."""


class Frames:
    """A WebSocket that is told frames."""

    garbage: tuple[bytes, ...] = (
        b"",
        b"INCP",
        b"XXXX" + bytes(20),
        b"INCP\2\x05" + bytes(18) + b"\1",
        b"INCP\2\xee" + bytes(18),
    )

    def __init__(self, address: str, model: str) -> None:
        self._address = f"{address.replace('http', 'ws', 1)}/models/{model}/decode?rows=0"
        self._socket: ClientConnection | None = None
        self.number = 0

    async def open(self, offset: list[int]) -> None:
        """Connect, with rows at `offset`."""
        await self.leave()
        self._socket = await connect(self._address, compression=None, max_size=None, close_timeout=1)
        self.number = 0
        await self.ask({"append": offset}, 0)

    async def leave(self) -> None:
        """Leave without a word."""
        if self._socket is not None:
            self._socket.transport.abort()
            await self._socket.wait_closed()
            self._socket = None

    async def ask(self, message: Message, number: int) -> Told:
        """Send a message with a number, or 0, and return what comes."""
        assert self._socket is not None
        self.number = max(self.number, number)
        await self._socket.send(self.write(message, number))
        return self.read(await self._socket.recv())

    def write(self, message: Message, number: int) -> bytes | str:
        """Return a frame."""
        if isinstance(message, bytes):
            return message
        if "input_ids" not in message:
            ((name, integers),) = message.items()
            listed = np.array([] if integers is True else integers, np.int64)
            return write_frame(Move(MOVES[name], listed), number, [], [])
        values, lengths = read_rows("input_ids", message["input_ids"])
        parts = {"input_ids": values}
        if "position_ids" in message:
            parts["position_ids"] = read_rows("position_ids", message["position_ids"])[0]
        return write_frame(Step(parts, lengths), number, message.get("offset", []), [])

    def read(self, answer: bytes | str) -> Told:
        """Read a frame."""
        assert isinstance(answer, bytes)
        # Broken frames are answered in version 1, of which no more is known here.
        found = Answer(ERROR, 0, [], [], answer) if answer[4] == 1 else read_frame(answer)
        if found.kind == ERROR:
            return Told(refused=str(found.text))
        return Told(found.offset, found.tensors[0].reshape(-1, found.tensors[0].shape[-1]) if found.tensors else None)


class Texts(Frames):
    """A WebSocket that is told JSON."""

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
        """Return JSON."""
        if isinstance(message, bytes):
            return message.decode()
        return json.dumps(message | ({"step": number} if number else {}))

    def read(self, answer: bytes | str) -> Told:
        """Read JSON."""
        return told(json.loads(answer))


class Lines(Texts):
    """Lines of JSON over HTTP."""

    garbage: tuple[bytes, ...] = Texts.garbage[1:]

    def __init__(self, address: str, model: str) -> None:
        self._host = httpx.URL(address)
        self._path = f"/models/{model}/decode?rows=0"
        self._writer: asyncio.StreamWriter | None = None
        self.number = 0

    async def open(self, offset: list[int]) -> None:
        """Begin a request, with rows at `offset`."""
        await self.leave()
        self._reader, self._writer = await asyncio.open_connection(self._host.host, self._host.port)
        head = f"POST {self._path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
        self._writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        answered = await self._reader.readuntil(b"\r\n\r\n")
        if not answered.startswith(b"HTTP/1.1 200 "):
            raise Wrong(answered)
        self.number = 0
        await self.ask({"append": offset}, 0)

    async def leave(self) -> None:
        """Leave without a word."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    async def ask(self, message: Message, number: int) -> Told:
        """Send a line and return what comes."""
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


def told(document: Any) -> Told:
    """Read an answer of JSON."""
    if "error" in document:
        return Told(refused=str(document["error"]))
    if "embeddings" not in document:
        return Told(document["next_offset"])
    flat = np.frombuffer(base64.b64decode(document["embeddings"]), "<f4")
    return Told(document["next_offset"], flat.reshape(-1, document["shape"][-1]))


class Clients:
    """The client of this package, which resumes by itself."""

    garbage: tuple[bytes, ...] = ()

    def __init__(self, address: str, model: str) -> None:
        self._client = incipit.connect_async(address, timeout=PATIENCE, retries=8)
        self._model = model
        self._context: Any = None
        self.number = 0

    async def open(self, offset: list[int]) -> None:
        """Open a stream, with rows at `offset`."""
        await self.leave()
        context = self._client.decode(self._model, offset=offset, resume=True)
        self._stream = await context.__aenter__()
        self._context = context

    async def leave(self) -> None:
        """Leave."""
        if self._context is not None:
            await self._context.__aexit__(None, None, None)
            self._context = None

    async def ask(self, message: Message, number: int) -> Told:  # noqa: ARG002 - it counts by itself
        """Call a method and return what it says."""
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
            return Told(refused=str(error))
        return Told(stream.offset, vectors)


class Soak:
    """What all streams share.

    Args:
        truth: of the model.
        model: its name.
        address: of the proxy before the server.
        steps: how many are to be answered.

    """

    def __init__(self, truth: Truth, model: str, address: str, steps: int) -> None:
        self.truth, self.model, self.address, self.steps = truth, model, address, steps
        self.done = 0
        self.counts: Counter[str] = Counter()

    async def stream(self, door: Callable[[str, str], Any], seed: int) -> None:
        """Feed one stream, until there are enough steps."""
        player = Player(self, door(self.address, self.model), np.random.default_rng(seed))
        try:
            await player.play()
        finally:
            with suppress(*BROKEN):
                await player.door.leave()

    async def events(self, seed: int) -> None:
        """Ask for the events of one list of ids after another, until there are enough steps."""
        random = np.random.default_rng(seed)
        limit, vocabulary = len(self.truth.positions), len(self.truth.tokens)
        async with httpx.AsyncClient(base_url=self.address, timeout=PATIENCE) as http:
            while self.done < self.steps:
                lengths = random.integers(1, 9, random.integers(1, 4))
                offset = [int(random.integers(0, limit - length + 1)) for length in lengths]
                ids = [random.integers(0, vocabulary, length).tolist() for length in lengths]
                chunk = int(random.integers(1, 5))
                bad = random.random() < 0.1
                if bad:
                    ids[0][-1] = vocabulary
                fields = {"input_ids": ids, "offset": offset, "chunk": chunk}
                kind = {"Accept": "text/event-stream"}
                post = http.post(f"/models/{self.model}/decode", json=fields, headers=kind)
                try:
                    answer = await post
                except httpx.TransportError as error:
                    if isinstance(error, httpx.TimeoutException):
                        raise Wrong("events hang") from error
                    self.counts["breaks"] += 1
                    continue
                self.check_events(answer, ids, offset, chunk, bad)

    def check_events(
        self, answer: httpx.Response, ids: list[list[int]], offset: list[int], chunk: int, bad: bool
    ) -> None:
        """Compare each event with the truth."""
        begins = range(0, max(map(len, ids)), chunk)
        last_good = (len(ids[0]) - 1) // chunk if bad else len(begins)
        if bad and last_good == 0:
            expect(answer.status_code == 422, "a bad first chunk", answer.text[:200])
            self.counts["bad"] += 1
            return
        *events, rest = answer.text.split("\n\n")
        expect(answer.status_code == 200 and not rest, "events", answer.text[:200])
        last = events.pop()
        expect(last.startswith("event: error\n" if bad else "event: end\n"), "the last event", last)
        expect(len(events) == min(last_good, len(begins)), "the number of events", len(events))
        for begin, event in zip(begins, events, strict=False):
            part = [row[begin : begin + chunk] for row in ids]
            places = [[at + begin + index for index in range(len(row))] for at, row in zip(offset, part, strict=True)]
            found = told(json.loads(event.partition("\ndata: ")[2])).vectors
            expect(found is not None and found.tobytes() == self.truth.vectors(part, places).tobytes(), "events", event)
            self.done += 1
        self.counts["events"] += 1
        self.counts["bad"] += bad


def expect(right: Any, what: str, got: object) -> None:
    """Raise where something is not right.

    Raises:
        Wrong: it is not.

    """
    if not right:
        raise Wrong(f"{what}: {got}")


class Player:
    """One stream: what it is told is drawn at random, and what must come is known before.

    Args:
        soak: what all streams share.
        door: the connection.
        random: draws.

    """

    def __init__(self, soak: Soak, door: Any, random: np.random.Generator) -> None:
        self.soak, self.door, self.random = soak, door, random
        self.limit, self.vocabulary = len(soak.truth.positions), len(soak.truth.tokens)
        self.offset = self.draw(int(random.integers(1, MOST_ROWS)), self.limit)

    def draw(self, size: int, limit: int) -> list[int]:
        """Return integers from 0 to `limit` - 1."""
        return [int(value) for value in self.random.integers(0, limit, size)]

    async def play(self) -> None:
        """Tell one thing after another."""
        await self.open()
        while self.soak.done < self.soak.steps:
            chance = self.random.random()
            if chance < 0.003:
                await self.open()
                self.soak.counts["left"] += 1
            elif chance < 0.04:
                await self.refused()
            elif chance < 0.16 or not self.offset:
                await self.move()
            else:
                await self.step()

    async def attempt(self, action: Callable[[], Awaitable[T]]) -> T | None:
        """Do something; None where the connection broke."""
        try:
            async with asyncio.timeout(PATIENCE):
                return await action()
        except TimeoutError:
            raise Wrong(f"{type(self.door).__name__} hangs at {self.offset}") from None
        except BROKEN as error:
            if isinstance(error, ConnectionClosed) and error.rcvd is not None:
                raise Wrong(f"the server closed the stream: {error}") from error
            self.soak.counts["breaks"] += 1
            return None

    async def open(self) -> None:
        """Open the stream where its rows are, through as many connections as it takes."""

        async def opened() -> bool:
            await self.door.open(self.offset)
            return True

        while not await self.attempt(opened):
            pass

    async def tell(self, message: Message, number: int = 0) -> Told:
        """Tell it something, once more where the connection breaks: nothing was done that was not answered."""
        while (answer := await self.attempt(lambda: self.door.ask(message, number))) is None:
            await self.open()
        told: Told = answer
        return told

    async def refused(self) -> None:
        """Tell it what is not allowed."""
        beyond = max([self.limit, *self.offset])
        row = len(self.offset)
        choices: list[Message] = [
            *self.door.garbage,
            {"input_ids": [[0]] * (row + 1)},
            {"input_ids": [[self.vocabulary]] + [[0]] * (row - 1)},
            {"input_ids": [[-1]] + [[0]] * (row - 1)},
            {"input_ids": [[0] * (self.limit + 1)] + [[]] * (row - 1)},
            {"reorder": [row]},
            {"append": [self.limit + 1]},
            {"drop": [-1]},
        ]
        if row:  # else there is nothing that is too far
            choices.append({"rewind": [beyond + 1]})
        if row and not isinstance(self.door, Clients):
            choices.append({"input_ids": [[0]] * row, "offset": [at + 1 for at in self.offset]})
        message = choices[int(self.random.integers(len(choices)))]
        answer = await self.tell(message)
        expect(answer.refused, f"{message!r:.200} at {self.offset}", answer)
        self.soak.counts["bad"] += 1

    async def move(self) -> None:
        """Rewind, reorder, append or drop."""
        name = str(self.random.choice(["rewind", "rewind", "reorder", "append", "drop", "ping"]))
        rows, after = len(self.offset), list(self.offset)
        value: Any = True
        if name == "append" or not rows:
            name, value = "append", self.draw(1 + (rows == 0), self.limit)
            if rows >= MOST_ROWS:
                name, value = "drop", self.draw(1, rows)
            after = self.offset + value
        if name == "rewind":
            value = after = [int(self.random.integers(0, at + 1)) for at in self.offset]
        elif name == "reorder":
            value = self.draw(int(self.random.integers(1, MOST_ROWS + 1)), rows)
            after = [self.offset[row] for row in value]
        elif name == "drop":
            value = self.draw(1, rows) if value is True else value
            after = [at for row, at in enumerate(self.offset) if row not in value]
        answer = await self.tell({name: value})
        expect(not answer.refused and answer.offset == after, f"{name} {value} at {self.offset}", answer)
        self.offset = after
        self.soak.counts[name] += 1

    async def step(self) -> None:
        """Feed tokens, sometimes at places of our own, sometimes twice."""
        random, rows = self.random, len(self.offset)
        lengths = [1] * rows if random.random() < 0.7 else [int(n) for n in random.integers(0, LONGEST + 1, rows)]
        if not any(lengths):
            lengths[0] = 1
        ids = [self.draw(length, self.vocabulary) for length in lengths]
        message: dict[str, Any] = {"input_ids": ids}
        after = [at + length for at, length in zip(self.offset, lengths, strict=True)]
        places = [list(range(at, end)) for at, end in zip(self.offset, after, strict=True)]
        if random.random() < 0.05:
            message["position_ids"] = places = [self.draw(length, self.limit) for length in lengths]
            after = [max(row) + 1 if row else at for row, at in zip(places, self.offset, strict=True)]
        elif random.random() < 0.3:
            message["offset"] = self.offset
        twice = random.random() < 0.05 and not isinstance(self.door, Clients)
        number = self.door.number + 1 if twice else 0
        answer = await self.tell(message, number)
        if "position_ids" not in message and max(after) > self.limit:
            expect(answer.refused, f"{message!r} at {self.offset}", answer)
            await self.rewind_all()
            return
        expected = self.soak.truth.vectors(ids, places)
        self.check(message, answer, after, expected)
        self.offset = after
        if twice:
            # Where the connection broke here, nobody knows any more what the step was.
            again = await self.attempt(lambda: self.door.ask(message, number))
            if again is None:
                await self.open()
            else:
                self.check(message, again, after, expected)
                self.soak.counts["repeated"] += 1

    def check(self, message: Message, answer: Told, after: list[int], expected: Vectors) -> None:
        """Compare the answer to a step with what it must be."""
        right = answer.vectors is not None and answer.vectors.tobytes() == expected.tobytes()
        expect(right and answer.offset == after, f"{message!r} to {after} by {type(self.door).__name__}", answer)
        self.soak.done += 1

    async def rewind_all(self) -> None:
        """Make room where a row is at its end."""
        self.soak.counts["full"] += 1
        after = [at // 2 for at in self.offset]
        answer = await self.tell({"rewind": after})
        expect(answer.offset == after, f"rewind at {self.offset}", answer)
        self.offset = after


class Proxy:
    """Cuts each connection to a server after a random number of bytes.

    Args:
        address: of the server.
        seed: of the numbers.

    """

    def __init__(self, address: str, seed: int) -> None:
        self._target = httpx.URL(address)
        self._random = np.random.default_rng(seed)
        self._carried: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen, and return where."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close everything."""
        self._server.close()
        for task in self._carried:
            task.cancel()
        await asyncio.gather(*self._carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Some lives are short, so that handshakes break too.
        life = [int(self._random.exponential(LIFE if self._random.random() < 0.9 else 600))]
        ends = [writer]
        tasks: list[asyncio.Task[None]] = []
        try:
            far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
            ends.append(far_writer)
            both = (self._copy(reader, far_writer, life), self._copy(far_reader, writer, life))
            tasks += [asyncio.create_task(one) for one in both]
            self._carried.update(tasks)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._carried.difference_update(tasks)
            for end in ends:
                end.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, life: list[int]) -> None:
        with suppress(OSError):
            while life[0] > 0 and (data := await source.read(2**16)):
                target.write(data[: life[0]])
                life[0] -= len(data)
                await target.drain()


def own_memory(pid: int) -> int:
    """Return the bytes of a process and its children that are no pages of files."""
    tasks = Path(f"/proc/{pid}/task")
    children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) * 1024 + sum(map(own_memory, children))


async def run(truth: Truth, model: str, address: str, pid: int, steps: int, streams: int, seed: int) -> Soak:
    """Feed `streams` streams of every door, and sample the memory of the server; return what was done."""
    proxy = Proxy(address, seed)
    soak = Soak(truth, model, await proxy.start(), steps)
    memory: list[tuple[int, int]] = []

    async def sample() -> None:
        while True:
            memory.append((soak.done, own_memory(pid)))
            await asyncio.sleep(0.2)

    sampling = asyncio.ensure_future(sample())
    begin = time.perf_counter()
    doors = (Frames, Texts, Lines, Clients)
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(streams):
                for number, door in enumerate(doors):
                    group.create_task(soak.stream(door, seed + index * 10 + number))
                group.create_task(soak.events(seed + index * 10 + 9))
    finally:
        sampling.cancel()
        await proxy.stop()
    seconds = time.perf_counter() - begin
    await all_left(address)
    quarters = [
        max((size for done, size in memory if steps * part / 4 <= done < steps * (part + 1) / 4), default=0)
        for part in range(4)
    ]
    print(f"{soak.done} steps in {seconds:.0f} s ({soak.done / seconds:.0f} a second): every vector bit for bit")
    print(", ".join(f"{count} {name}" for name, count in sorted(soak.counts.items())))
    print("peak of the server's own memory, by quarter:", ", ".join(f"{size / 2**20:.1f} MiB" for size in quarters))
    expect(quarters[3] - quarters[2] <= GROWTH, "memory grew", quarters)
    return soak


async def all_left(address: str) -> None:
    """Wait until the server has seen that all streams are gone.

    Raises:
        Wrong: some are still open.

    """
    async with httpx.AsyncClient(base_url=address) as http:
        for _ in range(100):
            text = (await http.get("/metrics")).text
            if re.search(r"^incipit_streams_open 0(\.0)?$", text, re.MULTILINE):
                return
            await asyncio.sleep(0.1)
    raise Wrong(f"streams are still open: {re.findall('^incipit_streams_open.*', text, re.MULTILINE)}")


def main() -> None:
    """Serve, soak, and say what was seen."""
    parser = argparse.ArgumentParser(description="Feed and break many streams, and check every bit.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="answered steps (default: 1000000)")
    parser.add_argument("--streams", type=int, default=4, help="of each door (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"), help="default: model_repository")
    parser.add_argument("--model", default="gpt2-small", help="of tokens and learned positions (default: gpt2-small)")
    given = parser.parse_args()
    truth = Truth(max((given.repository / given.model).glob("[1-9]*"), key=lambda folder: int(folder.name)))
    command = [str(Path(sys.executable).parent / "incipit"), "serve", "--repository", str(given.repository)]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))
            asyncio.run(run(truth, given.model, found[0], server.pid, given.steps, given.streams, given.seed))
        except* Wrong as wrong:
            raise SystemExit("\n".join(map(str, wrong.exceptions))) from None
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
