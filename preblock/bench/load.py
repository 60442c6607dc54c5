"""One measurement: connections under load for some seconds, with progress reports."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import uvloop

from preblock.bench.connections import DecodeConnection, GrpcConnection, HttpConnection
from preblock.bench.report import line
from preblock.bench.stats import LoadResult
from preblock.bench.workload import LoadTarget, json, npy, random_ids, v2
from preblock.client.errors import NoAnswer, ServiceError, TimedOut
from preblock.client.results import Model

PROTOCOLS = ("npy", "v2", "json", "grpc", "steps")
RECONNECT_SECONDS = 0.1
REPORT_INTERVAL_SECONDS = 0.5

LoadConnection = HttpConnection | DecodeConnection | GrpcConnection
Report = Callable[[str], None]


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

    drivers = [_ConnectionDriver(make(), timeout) for _ in range(connections)]
    return uvloop.run(_measure(drivers, partial(LoadResult, protocol, shape, connections), seconds, report))


async def _measure(
    drivers: "list[_ConnectionDriver]", start: Callable[[], LoadResult], seconds: float, report: Report
) -> LoadResult:
    try:
        for driver in drivers:
            await driver.open()
        await asyncio.gather(*(driver.run(0.0, start()) for driver in drivers))
        result = start()
        reporting = asyncio.create_task(_report_progress(result, report))
        await asyncio.gather(*(driver.run(result.begin + seconds, result) for driver in drivers))
        reporting.cancel()
        result.end = max(result.end, result.begin + seconds)  # if the last requests failed
    finally:
        for driver in drivers:
            driver.connection.close()
    return result


class _ConnectionDriver:
    """Keeps one connection under load, and opens it again if it breaks."""

    def __init__(self, connection: LoadConnection, timeout: float) -> None:
        self.connection, self._timeout = connection, timeout
        self._broken = False

    async def open(self) -> None:
        """Connect."""
        try:
            async with asyncio.timeout(self._timeout):
                await self.connection.open()
        except TimeoutError:
            address = self.connection.address
            raise TimedOut(f"no connection to {address} within {self._timeout:g} s") from None

    async def run(self, until: float, result: LoadResult) -> None:
        """Send at least one request, and more until the time `until`; count the outcomes."""
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    if self._broken:
                        self.connection.close()
                        await self.connection.open()
                        self._broken = False
                    sent = time.perf_counter()
                    result.count_answer(sent, await self.connection.exchange())
            except ServiceError as error:
                result.count_error(error.kind, str(error))
            except (OSError, NoAnswer) as error:
                self._broken = True
                # TimeoutError is an OSError without a message.
                result.count_error(type(error).__name__, str(error) or f"no answer within {self._timeout:g} s")
            if time.perf_counter() >= until:
                return
            if self._broken:
                await asyncio.sleep(RECONNECT_SECONDS)


async def _report_progress(result: LoadResult, report: Report) -> None:
    while True:
        await asyncio.sleep(REPORT_INTERVAL_SECONDS)
        report(line(result))
