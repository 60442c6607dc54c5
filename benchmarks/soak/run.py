"""The run of all clients, with the memory of the server and the totals."""

import asyncio
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Protocol

import httpx
import numpy as np

from benchmarks.soak.common import Soak, SoakFailure, expect
from benchmarks.soak.events import Events
from benchmarks.soak.over_grpc import Calls, Streams
from benchmarks.soak.over_http import Embed, Infer, OpenAIEmbeddings
from benchmarks.soak.player import Player
from benchmarks.soak.proxy import Proxy
from benchmarks.soak.questions import Asker
from benchmarks.soak.streams import ClientStreams, Frames, Lines, Texts

STEPS, REQUESTS = (400_000,), (400_000, 40_000_000)
"""Mean bytes until a connection is cut: for streams, and for requests with small or large answers."""


class SoakTarget(NamedTuple):
    """The server.

    Args:
        http: host and port of HTTP.
        grpc: host and port of gRPC.
        pid: id of its process.

    """

    http: str
    grpc: str
    pid: int


class SoakClient(Protocol):
    """A client of one protocol."""

    async def play(self) -> None:
        """Send requests until the test is over."""


class Proxies:
    """The proxies between the clients and the server.

    Args:
        server: the server.
        seed: seed of the random cuts.

    """

    def __init__(self, server: SoakTarget, seed: int) -> None:
        self._all = [
            Proxy(server.http, seed, STEPS),
            Proxy(server.http, seed + 1, REQUESTS),
            Proxy(server.grpc, seed + 2, REQUESTS),
        ]

    async def start(self) -> None:
        """Start the proxies."""
        steps, requests, self.grpc = [await proxy.start() for proxy in self._all]
        self.steps, self.requests = f"http://{steps}", f"http://{requests}"

    async def stop(self) -> None:
        """Stop the proxies."""
        for proxy in self._all:
            await proxy.stop()


PROTOCOLS: dict[str, Callable[[Soak, Proxies, np.random.Generator], SoakClient]] = {
    "frames": lambda soak, through, random: Player(soak, Frames(through.steps, soak.model), random),
    "text": lambda soak, through, random: Player(soak, Texts(through.steps, soak.model), random),
    "lines": lambda soak, through, random: Player(soak, Lines(through.steps, soak.model), random),
    "client": lambda soak, through, random: Player(soak, ClientStreams(through.steps, soak.model), random),
    "events": lambda soak, through, random: Events(soak, through.steps, random),
    "embed": lambda soak, through, random: Asker(soak, Embed(soak, through.requests), random),
    "infer": lambda soak, through, random: Asker(soak, Infer(soak, through.requests), random),
    "embeddings": lambda soak, through, random: Asker(soak, OpenAIEmbeddings(soak, through.requests), random),
    "ModelInfer": lambda soak, through, random: Asker(soak, Calls(soak, through.grpc), random),
    "ModelStreamInfer": lambda soak, through, random: Asker(soak, Streams(soak, through.grpc), random),
}


async def run(
    soak: Soak,
    server: SoakTarget,
    clients: int,
    seed: int,
    growth: float,
    protocols: Collection[str] = tuple(PROTOCOLS),
) -> None:
    """Run the clients of each protocol, sample the memory of the server, and print the totals.

    Args:
        soak: state shared by all clients.
        server: the server.
        clients: number of clients of each protocol.
        seed: seed of all random numbers.
        growth: allowed growth of the least memory from the third quarter to the last, in MiB.
        protocols: names of the protocols.

    Raises:
        ExceptionGroup: a group of SoakFailure after wrong answers.
        SoakFailure: a stream stays open, or the memory grows.

    """
    proxies = Proxies(server, seed)
    await proxies.start()
    quarters: list[list[float]] = [[], [], [], []]

    async def sample() -> None:
        while True:
            quarters[min(int(4 * soak.done), 3)].append(own_memory(server.pid) / 2**20)
            await asyncio.sleep(0.2)

    sampling = asyncio.ensure_future(sample())
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(clients):
                for number, protocol in enumerate(protocols):
                    client = PROTOCOLS[protocol](soak, proxies, np.random.default_rng((seed, index, number)))
                    group.create_task(client.play())
    finally:
        sampling.cancel()
        await proxies.stop()
    await all_left(f"http://{server.http}")
    count = soak.right.total()
    print(f"{count} answers in {soak.seconds:.0f} s ({count / soak.seconds:.0f} a second): every bit is right")
    for protocol in protocols:
        right, refused, broken = soak.right[protocol], soak.refused[protocol], soak.broken[protocol]
        print(f"{protocol}: {right} right, {refused} refused, {broken} broken off")
    print(", ".join(f"{count} {name}" for name, count in sorted(soak.counts.items())))
    seen = ", ".join(f"{min(sizes):.1f} to {max(sizes):.1f}" for sizes in quarters if sizes)
    print(f"MiB of the server's own memory, by quarter: {seen}")
    if all(quarters):
        expect(min(quarters[3]) - min(quarters[2]) <= growth, "memory grew", seen)


def own_memory(pid: int) -> int:
    """Return the anonymous memory of a process and its children, in bytes."""
    tasks = Path(f"/proc/{pid}/task")
    children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) * 1024 + sum(map(own_memory, children))


async def all_left(address: str) -> None:
    """Wait until the server counts no open stream.

    Raises:
        SoakFailure: streams are still open after ten seconds.

    """
    async with httpx.AsyncClient(base_url=address) as http:
        for _ in range(100):
            text = (await http.get("/metrics")).text
            if re.search(r"^preblock_streams_open 0(\.0)?$", text, re.MULTILINE):
                return
            await asyncio.sleep(0.1)
    raise SoakFailure(f"streams are still open: {re.findall('^preblock_streams_open.*', text, re.MULTILINE)}")
