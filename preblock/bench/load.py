"""One measurement: links that ask for a while, and whoever looks on."""

import asyncio
import time
from collections.abc import Callable

import uvloop

from preblock.bench.connections import GrpcLink, HttpLink, Link, StepLink
from preblock.bench.report import line
from preblock.bench.stats import Result, Tally
from preblock.bench.workload import Target, json, npy, random_ids, v2
from preblock.client.errors import NoAnswer, ServiceError, TimedOut
from preblock.client.results import Model

PROTOCOLS = ("npy", "v2", "json", "grpc", "steps")
PAUSE, LOOK = 0.1, 0.5
"""Seconds before a broken connection is made again, and between two looks at a measurement."""

Look = Callable[[str], None]
Show = Callable[[Tally], None]


def measure(
    target: Target,
    model: Model,
    protocol: str,
    shape: tuple[int, int],
    *,
    connections: int = 4,
    seconds: float = 5.0,
    timeout: float = 30.0,
    look: Look = lambda _: None,
) -> Result:
    """Ask for random ids of one shape by one protocol, over so many connections at a time.

    Args:
        target: where.
        model: what the server says of the model.
        protocol: one of `PROTOCOLS`.
        shape: rows, and tokens of each.
        connections: each asks as soon as it was answered.
        seconds: for which they ask; what is on the way then is waited for. One request of each goes before.
        timeout: seconds that connecting, and an answer, may take.
        look: is told how it goes, in a line, every half second.

    Raises:
        Invalid: the model takes no ids, or none of that shape.
        OSError, NoAnswer, ServiceError: no connection could be made at the beginning.

    """
    ids = random_ids(model, shape)
    requests = {"npy": npy, "v2": v2, "json": json}

    def make() -> Link:
        if protocol == "grpc":
            return GrpcLink(target, ids)
        if protocol == "steps":
            return StepLink(target, ids, model.max_len)
        return HttpLink(target, requests[protocol](target, ids))

    tally = uvloop.run(_measure(make, connections, seconds, timeout, lambda tally: look(line(tally, protocol, shape))))
    return Result.of(tally, protocol, shape, connections)


async def _measure(make: Callable[[], Link], connections: int, seconds: float, timeout: float, show: Show) -> Tally:
    links = [make() for _ in range(connections)]
    try:
        for link in links:
            try:
                async with asyncio.timeout(timeout):
                    await link.open()
            except TimeoutError:
                raise TimedOut(f"no connection to {link.address} within {timeout:g} s") from None
        drives = [_Drive(link, make, timeout) for link in links]
        await asyncio.gather(*(drive.run(0.0, Tally()) for drive in drives))
        tally = Tally()
        looking = asyncio.create_task(_look(tally, show))
        await asyncio.gather(*(drive.run(tally.begin + seconds, tally) for drive in drives))
        looking.cancel()
        links = [drive.link for drive in drives]
    finally:
        for link in links:
            link.close()
    return tally


class _Drive:
    """Keeps one connection asking, and makes another where it breaks."""

    def __init__(self, link: Link, make: Callable[[], Link], timeout: float) -> None:
        self.link, self._make, self._timeout = link, make, timeout
        self._open = True

    async def run(self, until: float, tally: Tally) -> None:
        """Ask until the time has come, and count what happens."""
        while True:
            self.link.tally = tally
            try:
                async with asyncio.timeout(max(0.0, until - time.perf_counter()) + self._timeout):
                    if not self._open:
                        await self.link.open()
                    self._open = True
                    await self.link.ask(until)
                if time.perf_counter() >= until:
                    return
                self._renew()
            except (OSError, NoAnswer, ServiceError) as error:
                # TimeoutError is an OSError; what is raised for it has no words of its own.
                tally.failed(type(error).__name__, str(error) or f"no answer within {self._timeout:g} s")
                self._renew()
                if time.perf_counter() >= until:
                    return
                await asyncio.sleep(PAUSE)

    def _renew(self) -> None:
        self.link.close()
        self.link, self._open = self._make(), False


async def _look(tally: Tally, show: Show) -> None:
    while True:
        await asyncio.sleep(LOOK)
        show(tally)
