"""One measurement: connections under load for some seconds, with progress reports."""

import asyncio
import time
from collections.abc import Callable

import uvloop

from preblock.bench.connections import DecodeConnection, HttpConnection
from preblock.bench.grpc_connection import GrpcConnection
from preblock.bench.report import line
from preblock.bench.stats import LoadCounters, LoadResult
from preblock.bench.workload import LoadTarget, json, npy, random_ids, v2
from preblock.client.errors import NoAnswer, ServiceError, TimedOut
from preblock.client.results import Model

PROTOCOLS = ("npy", "v2", "json", "grpc", "steps")
RECONNECT_SECONDS = 0.1
REPORT_INTERVAL_SECONDS = 0.5
"""Seconds before a broken connection is replaced, and between two progress reports."""

LoadConnection = HttpConnection | DecodeConnection | GrpcConnection
Report = Callable[[str], None]
Show = Callable[[LoadCounters], None]


def measure(
    target: LoadTarget,
    model: Model,
    protocol: str,
    shape: tuple[int, int],
    *,
    connections: int = 4,
    seconds: float = 5.0,
    timeout: float = 30.0,
    report: Report = lambda _: None,
) -> LoadResult:
    """Measure one protocol with random ids of one shape.

    Args:
        target: model and server.
        model: description of the model by the server.
        protocol: one of `PROTOCOLS`.
        shape: rows, and tokens per row.
        connections: number of concurrent connections, each with one request at a time.
        seconds: duration, after one warm-up request per connection; requests in flight at the end are finished.
        timeout: seconds to wait for a connection, and for an answer.
        report: receives a progress line every half second.

    Raises:
        RequestError: the model takes no ids, or not of that shape.
        OSError, NoAnswer, ServiceError: a first connection failed.

    """
    ids = random_ids(model, shape)
    requests = {"npy": npy, "v2": v2, "json": json}

    def make() -> LoadConnection:
        if protocol == "grpc":
            return GrpcConnection(target, ids)
        if protocol == "steps":
            return DecodeConnection(target, ids, model.max_len)
        return HttpConnection(target, requests[protocol](target, ids))

    def show(counters: LoadCounters) -> None:
        report(line(counters, protocol, shape))

    counters = uvloop.run(_measure(make, connections, seconds, timeout, show))
    return LoadResult.of(counters, protocol, shape, connections)


async def _measure(
    make: Callable[[], LoadConnection], connections: int, seconds: float, timeout: float, show: Show
) -> LoadCounters:
    links = [make() for _ in range(connections)]
    try:
        for link in links:
            try:
                async with asyncio.timeout(timeout):
                    await link.open()
            except TimeoutError:
                raise TimedOut(f"no connection to {link.address} within {timeout:g} s") from None
        drivers = [_ConnectionDriver(link, make, timeout) for link in links]
        await asyncio.gather(*(driver.run(0.0, LoadCounters()) for driver in drivers))
        counters = LoadCounters()
        reporting = asyncio.create_task(_report_progress(counters, show))
        await asyncio.gather(*(driver.run(counters.begin + seconds, counters) for driver in drivers))
        reporting.cancel()
        links = [driver.link for driver in drivers]
    finally:
        for link in links:
            link.close()
    return counters


class _ConnectionDriver:
    """Keeps one connection under load, and replaces it if it breaks."""

    def __init__(self, link: LoadConnection, make: Callable[[], LoadConnection], timeout: float) -> None:
        self.link, self._make, self._timeout = link, make, timeout
        self._broken = False

    async def run(self, until: float, counters: LoadCounters) -> None:
        """Send at least one request, and more until the time `until`; count the outcomes."""
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    if self._broken:
                        self.link.close()
                        self.link = self._make()
                        await self.link.open()
                        self._broken = False
                    sent = time.perf_counter()
                    counters.answered(sent, await self.link.exchange())
            except ServiceError as error:
                counters.failed(error.kind, str(error))
            except (OSError, NoAnswer) as error:
                self._broken = True
                # TimeoutError is an OSError without a message.
                counters.failed(type(error).__name__, str(error) or f"no answer within {self._timeout:g} s")
            if time.perf_counter() >= until:
                return
            if self._broken:
                await asyncio.sleep(RECONNECT_SECONDS)


async def _report_progress(counters: LoadCounters, show: Show) -> None:
    while True:
        await asyncio.sleep(REPORT_INTERVAL_SECONDS)
        show(counters)
