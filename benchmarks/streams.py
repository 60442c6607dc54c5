"""Latency, throughput and memory of decode streams.

    python -m benchmarks.streams

Serves gpt2-small of `model_repository`, and in the same server a bare WebSocket with canned answers of the same size.
Each step is a frame with one row and one token. Prints:

- memory of an idle stream: growth of the proportional set size of the server with 500 streams;
- 500 streams under load: steps per second, slowest stream over the mean, and steps per run of the model;
- one stream: latency of a step at the client, over the latency of the bare WebSocket, in turn.

The client in this process writes raw bytes, to cost little beside the server. The scheduler chooses the cores of both.
"""

import asyncio
import gc
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop

from preblock.service.app import create_app
from preblock.service.codecs.decode_frames import HEADER, MAGIC, REWIND, STEP, VERSION
from preblock.service.core.settings import Settings
from preblock.service.core.system import LIBC
from preblock.service.server.addresses import bind
from preblock.service.server.run import configure

SERVER_CORE, CLIENT_CORE = 0, 1
"""Cores of benchmarks with pinned processes."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` (malloc.h of glibc)."""
KEPT_BYTES = 32 * 2**20
"""Freed memory that the client keeps for reuse."""
MODEL, WIDTH, MOST_STEPS = "gpt2-small", 768, 1000
ECHO = "/echo"
STREAMS, SECONDS = 500, 10.0
ROUNDS, STEPS = 30, 300
"""For the latency: number of rounds, and steps of each stream in a round."""

Application = Callable[
    [dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]
]


def masked(frame: bytes) -> bytes:
    """Return a binary WebSocket message of a client, with mask 0."""
    return bytes((0x82, 0x80 | len(frame))) + bytes(4) + frame


STEP_MESSAGE = masked(HEADER.pack(MAGIC, VERSION, STEP, 0, 0, 1, 1, 0, bytes(3)) + struct.pack("<qI", 50, 1))
REWIND_MESSAGE = masked(HEADER.pack(MAGIC, VERSION, REWIND, 0, 0, 1, 0, 0, bytes(3)) + bytes(8))
VECTORS_BYTES = HEADER.size + 8 + 4 + 4 + 4 * WIDTH
ANSWER_BYTES = 4 + VECTORS_BYTES
STATE_BYTES = 2 + HEADER.size + 8


class Stream(asyncio.Protocol):
    """A decode stream; `steps` counts the answers."""

    def __init__(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self.steps, self.latencies = 0, [0.0]
        self._path, self._until, self._most = path, 0.0, 0
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the handshake of a WebSocket."""
        self.transport = cast(asyncio.Transport, transport)
        head = f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        key = "A" * 22 + "=="
        self.transport.write(f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        """Count a complete answer, and send the next step."""
        if not self.opened.done():
            assert data.startswith(b"HTTP/1.1 101"), data
            self.opened.set_result(None)
            return
        if data == b"\x89\x04" + data[2:6]:  # keepalive ping of the server
            return
        self._missing -= len(data)
        if self._missing:
            return
        now = time.perf_counter()
        self.latencies.append(now - self._sent)
        self.steps += 1
        if now < self._until and self.steps < self._most:
            self._send()
        elif not self.finished.done():
            self.finished.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - as asyncio has it
        """Fail the waiting futures."""
        for future in (self.opened, self.finished):
            if not future.done():
                future.set_exception(ConnectionError("the server closed a stream"))

    async def step(self, seconds: float = 1e9, most: int = 2**60) -> None:
        """Send a step after each answer, for some seconds or at most `most` steps."""
        self.finished = asyncio.get_running_loop().create_future()
        self.steps, self.latencies = 0, []
        self._until, self._most = time.perf_counter() + seconds, most
        self._send()
        await self.finished

    def _send(self) -> None:
        rewinds = self.steps % MOST_STEPS == 0
        self._sent = time.perf_counter()
        self._missing = ANSWER_BYTES + STATE_BYTES * rewinds
        self.transport.write(REWIND_MESSAGE * rewinds + STEP_MESSAGE)


async def open_stream(port: int, path: str = f"/models/{MODEL}/decode") -> Stream:
    """Return an open stream."""
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(path), "127.0.0.1", port)
    await stream.opened
    return stream


async def echo(receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Answer each message with the number of bytes of a real answer."""
    await receive()
    await send({"type": "websocket.accept"})
    step, rewind = bytes(VECTORS_BYTES), bytes(STATE_BYTES - 2)
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "bytes": step if len(message["bytes"]) > HEADER.size + 8 else rewind})


def serve() -> None:
    """Serve the application and the bare WebSocket with the server of Preblock, and print the port."""
    settings = Settings(port=0)
    app = create_app(settings)

    async def both(
        scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        await (echo(receive, send) if scope.get("path") == ECHO else app(scope, receive, send))

    listener = bind("port", settings.host, 0)
    listener.listen()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    gc.freeze()
    uvicorn.Server(configure(settings, both)).run(sockets=[listener])


@contextmanager
def running(*command: object) -> Iterator[tuple[int, int]]:
    """Run a server in a new process; yield the process id and the port."""
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = next(int(found[1]) for line in process.stdout if (found := re.search(r"https?://\S+:(\d+)", line)))
            yield process.pid, port
        finally:
            process.terminate()


def memory_of(pid: int) -> int:
    """Return the proportional set size of a process, in bytes."""
    return 1024 * int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("Pss:")[2].split()[0])


def runs_and_steps(port: int) -> tuple[float, float]:
    """Return the number of model runs, and of answered rows."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    runs = re.findall(rf'^preblock_model_stages_total{{.*model="{MODEL}".*stage="compute_infer".*}} (\S+)', text, re.M)
    rows = re.findall(rf'^preblock_model_rows_total{{.*model="{MODEL}".*}} (\S+)', text, re.M)
    return sum(map(float, runs)), sum(map(float, rows))


async def measure(pid: int, port: int) -> None:
    """Measure, and print the figures."""
    one, bare = await open_stream(port), await open_stream(port, ECHO)
    found: dict[Stream, list[tuple[float, float]]] = {one: [], bare: []}
    for _ in range(ROUNDS):
        for stream, quantiles in found.items():
            await stream.step(most=STEPS)
            cuts = statistics.quantiles(stream.latencies, n=100)
            quantiles.append((cuts[49], cuts[98]))
    ours, theirs = ([statistics.median(cut) for cut in zip(*found[stream], strict=True)] for stream in (one, bare))
    for name, step, other in zip(("p50", "p99"), ours, theirs, strict=True):
        print(f"one stream, {name}: {1e6 * step:.0f} us, bare {1e6 * other:.0f} us: {step / other:.2f} times as long")
    before = memory_of(pid)
    streams = await asyncio.gather(*(open_stream(port) for _ in range(STREAMS)))
    print(f"idle: {(memory_of(pid) - before) / STREAMS / 1000:.1f} kB for each of {STREAMS} streams")
    runs, rows = runs_and_steps(port)
    await asyncio.gather(*(stream.step(seconds=SECONDS) for stream in streams))
    runs, rows = (after - then for after, then in zip(runs_and_steps(port), (runs, rows), strict=True))
    counts = [stream.steps for stream in streams]
    mean = statistics.mean(counts)
    print(f"{STREAMS} streams: {sum(counts) / SECONDS:.0f} steps/s, slowest {min(counts) / mean:.2f} of the mean")
    print(f"{STREAMS} streams: {rows / runs:.1f} steps in a run of the model")
    for stream in (one, bare, *streams):
        stream.transport.abort()


def be_the_client(cores: Collection[int] = (CLIENT_CORE,)) -> None:
    """Move this process to the cores of the client, and exit on SIGTERM so that servers are ended.

    It keeps freed memory, as a tuned client does. Otherwise page faults take half of the time of tritonclient.
    """
    os.sched_setaffinity(0, cores)
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        LIBC.mallopt(parameter, KEPT_BYTES)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def main() -> None:
    """Serve and measure."""
    if sys.argv[1:] == ["serve"]:
        serve()
        return
    with running(sys.executable, "-m", "benchmarks.streams", "serve") as (pid, port):
        uvloop.run(measure(pid, port))


if __name__ == "__main__":
    main()
