"""All clients at once, and what is seen of them and of the server."""

import asyncio
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Protocol

import httpx
import numpy as np

from benchmarks.soak.events import Events
from benchmarks.soak.over_grpc import Calls, Streams
from benchmarks.soak.over_http import Embed, Infer, OpenAIEmbeddings
from benchmarks.soak.player import Player
from benchmarks.soak.proxy import Proxy
from benchmarks.soak.questions import Asker
from benchmarks.soak.shared import Soak, SoakFailure, expect
from benchmarks.soak.streams import ClientStreams, Frames, Lines, Texts

STEPS, REQUESTS = (400_000,), (400_000, 40_000_000)
"""Bytes that connections live on average: those of streams, and those of requests, of which some have large answers."""


class SoakTarget(NamedTuple):
    """Where it is.

    Args:
        http: its host and port.
        grpc: those of gRPC.
        pid: of its process.

    """

    http: str
    grpc: str
    pid: int


class SoakClient(Protocol):
    """Asks for something, again and again."""

    async def play(self) -> None:
        """Ask until it is enough."""


class Proxies:
    """Between the clients and a server.

    Args:
        server: behind them.
        seed: of the connections that they cut.

    """

    def __init__(self, server: SoakTarget, seed: int) -> None:
        self._all = [
            Proxy(server.http, seed, STEPS),
            Proxy(server.http, seed + 1, REQUESTS),
            Proxy(server.grpc, seed + 2, REQUESTS),
        ]

    async def start(self) -> None:
        """Listen."""
        steps, requests, self.grpc = [await proxy.start() for proxy in self._all]
        self.steps, self.requests = f"http://{steps}", f"http://{requests}"

    async def stop(self) -> None:
        """Close everything."""
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
    """Ask with so many clients at each protocol, sample the memory of the server, and say what was seen.

    Args:
        soak: what the clients share.
        server: that they ask.
        clients: of each protocol.
        seed: of everything random.
        growth: MiB by which the least memory of the last quarter may be above that of the one before.
        protocols: at which they ask.

    Raises:
        ExceptionGroup: of SoakFailure, where an answer is.
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
    """Return the bytes of a process and its children that are no pages of files."""
    tasks = Path(f"/proc/{pid}/task")
    children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) * 1024 + sum(map(own_memory, children))


async def all_left(address: str) -> None:
    """Wait until the server has seen that all streams are gone.

    Raises:
        SoakFailure: some are still open.

    """
    async with httpx.AsyncClient(base_url=address) as http:
        for _ in range(100):
            text = (await http.get("/metrics")).text
            if re.search(r"^preblock_streams_open 0(\.0)?$", text, re.MULTILINE):
                return
            await asyncio.sleep(0.1)
    raise SoakFailure(f"streams are still open: {re.findall('^preblock_streams_open.*', text, re.MULTILINE)}")
