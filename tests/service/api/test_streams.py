"""The lifetime of a stream, without its protocol."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from preblock.service.api.streams import StreamEnd, StreamLifetime, StreamRegistry
from preblock.service.core.settings import LiveSettings, Settings
from preblock.service.observability.metrics import Metrics


def run(test: Callable[[StreamRegistry, StreamLifetime], Awaitable[None]], idle: float = 20, total: float = 20) -> None:
    async def main() -> None:
        # The smallest value of a setting is 1 s: a test need not wait so long.
        current = Settings().model_copy(
            update={"stream_idle_timeout_seconds": idle, "stream_max_lifetime_seconds": total}
        )
        settings = LiveSettings(current)
        streams = StreamRegistry(Metrics(), settings)
        with streams.open() as lifetime:
            await test(streams, lifetime)
        streams.drain()  # no closed one

    asyncio.run(main())


async def forever() -> None:
    await asyncio.Event().wait()


async def at_once() -> int:
    return 5


def test_message_in_time_is_returned() -> None:
    async def test(_: StreamRegistry, lifetime: StreamLifetime) -> None:
        assert await lifetime.wait(at_once) == 5

    run(test)


@pytest.mark.parametrize(("idle", "total", "reason"), [(0.01, 20, "idle"), (20, 0.01, "time")])
def test_wait_ends_at_idle_or_total_timeout(idle: float, total: float, reason: str) -> None:
    async def test(_: StreamRegistry, lifetime: StreamLifetime) -> None:
        with pytest.raises(StreamEnd) as closing:
            await lifetime.wait(forever)
        assert closing.value.reason == reason

    run(test, idle, total)


def test_never_waiting_stream_ends_at_drain_and_timeout() -> None:
    async def test(streams: StreamRegistry, lifetime: StreamLifetime) -> None:
        streams.drain()
        with pytest.raises(StreamEnd, match="shutdown"):
            await lifetime.wait(at_once)

    run(test)

    async def late(_: StreamRegistry, lifetime: StreamLifetime) -> None:
        with pytest.raises(StreamEnd, match="time"):
            await lifetime.wait(at_once)

    run(late, total=0)


def test_drain_wakes_waiting_streams() -> None:
    async def test(streams: StreamRegistry, lifetime: StreamLifetime) -> None:
        waiting = asyncio.ensure_future(lifetime.wait(forever))
        await asyncio.sleep(0)
        streams.drain()
        streams.drain()
        with pytest.raises(StreamEnd, match="shutdown"):
            await waiting

    run(test)
