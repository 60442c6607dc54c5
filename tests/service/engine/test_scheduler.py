"""The scheduler: small work at once, large work in a bounded pool, and nobody hurt by another."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from preblock.service.core.errors import Unavailable
from preblock.service.engine.scheduler import Scheduler
from preblock.service.runtime.session import INLINE_MAX_VALUES
from tests.support.engines import live_settings

LARGE = INLINE_MAX_VALUES + 1


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    """Make a scheduler of one thread and a queue of one."""
    running = Scheduler(1, live_settings(max_queue_size=1))
    yield running
    running.close()


async def occupy(scheduler: Scheduler, gate: threading.Event) -> list[asyncio.Task[bool]]:
    """Fill the thread and the queue until `gate` is set."""
    tasks = [asyncio.create_task(scheduler.run(LARGE, gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    return tasks


def test_only_large_work_leaves_event_loop(scheduler: Scheduler) -> None:
    for size, elsewhere in ((0, False), (INLINE_MAX_VALUES, False), (LARGE, True)):
        thread = asyncio.run(scheduler.run(size, threading.current_thread))
        assert (thread is not threading.current_thread()) == elsewhere, size


def test_work_past_queue_timeout_never_runs() -> None:
    gate, ran = threading.Event(), list[int]()

    async def scenario() -> None:
        scheduler = Scheduler(1, live_settings(queue_timeout_seconds=0.1))
        first = asyncio.create_task(scheduler.run(LARGE, gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match=r"the request waited more than 0\.1 s in the queue") as refused:
            await scheduler.run(LARGE, lambda: ran.append(1))
        assert refused.value.retry_after == 1
        left = asyncio.create_task(scheduler.run(LARGE, lambda: ran.append(2)))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await asyncio.sleep(0.2)  # running work has no limit
        gate.set()
        assert await first is True
        assert await scheduler.run(LARGE, lambda: 3) == 3
        scheduler.close()

    asyncio.run(scenario())
    assert ran == []


def test_exception_reaches_only_its_caller(scheduler: Scheduler) -> None:
    """A failure leaves no reference cycle, which would keep the body of the request."""

    async def scenario(size: int) -> None:
        gc.collect()
        for _ in range(5):  # more often than pieces may wait
            with pytest.raises(ZeroDivisionError):
                await scheduler.run(size, lambda: 1 / 0)
            assert await scheduler.run(size, lambda: 1) == 1
        assert gc.collect() == 0

    for size in (INLINE_MAX_VALUES, LARGE):
        asyncio.run(scenario(size))


def test_cancelled_chunk_frees_its_place_in_the_queue(scheduler: Scheduler) -> None:
    async def scenario() -> None:
        gate, ran = threading.Event(), threading.Event()
        first, second = await occupy(scheduler, gate)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        third = asyncio.create_task(scheduler.run(LARGE, ran.set))
        await asyncio.sleep(0)
        assert not ran.is_set()
        gate.set()
        assert await first is True
        await third
        assert ran.is_set()

    asyncio.run(scenario())


def doubled(runs: list[list[int]]) -> Callable[[list[int]], list[int]]:
    """Return a function to double its members; it notes each run, and fails on a 0."""

    def run(members: list[int]) -> list[int]:
        runs.append(members)
        return [member * 2 * member // member for member in members]

    return run


HALF = INLINE_MAX_VALUES // 2
BATCHES: list[tuple[list[tuple[str, int, int]], list[list[int]]]] = [
    ([("a", 1, 1), ("b", 1, 2), ("a", 1, 3)], [[1, 3], [2]]),
    ([("a", HALF, 1), ("a", HALF, 2), ("a", 1, 3), ("a", INLINE_MAX_VALUES, 4), ("a", 1, 5)], [[1, 2], [3], [4], [5]]),
    ([("a", 1, 1), ("a", 1, 0), ("a", 1, 2)], [[0], [1], [1, 0, 2], [2]]),  # a failing one does not fail the others
]
"""Key, size and member of each request, and the runs."""


@pytest.mark.parametrize(("asked", "ran"), BATCHES, ids=["keys", "sizes", "failure"])
def test_work_of_one_iteration_runs_in_batches(
    scheduler: Scheduler, asked: list[tuple[str, int, int]], ran: list[list[int]]
) -> None:
    runs: list[list[int]] = []
    run = doubled(runs)

    async def scenario() -> list[int | BaseException]:
        members = (scheduler.run_batched(key, size, member, run) for key, size, member in asked)
        answers = await asyncio.gather(*members, return_exceptions=True)
        assert await scheduler.run_batched("a", 1, 9, run) == 18
        return answers

    answers = asyncio.run(scenario())
    assert [isinstance(answer, ZeroDivisionError) or answer for answer in answers] == [
        2 * member or True for _, _, member in asked
    ]
    assert sorted(runs) == [*ran, [9]]


def test_single_request_does_not_wait_for_batch(scheduler: Scheduler) -> None:
    async def scenario() -> list[str]:
        order: list[str] = []
        task = asyncio.create_task(scheduler.run_batched("a", 1, 1, doubled([])))
        task.add_done_callback(lambda _: order.append("answered"))
        for turn in range(4):
            await asyncio.sleep(0)
            order.append(f"turn {turn}")
        return order

    assert asyncio.run(scenario()) == ["turn 0", "turn 1", "answered", "turn 2", "turn 3"]


def test_cancelled_request_does_not_affect_others(scheduler: Scheduler) -> None:
    async def scenario(cancelled: set[int], runs: list[list[int]]) -> None:
        tasks = [asyncio.create_task(scheduler.run_batched("a", 1, number + 1, doubled(runs))) for number in range(4)]
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for number, answer in enumerate(answers):
            assert isinstance(answer, asyncio.CancelledError) if number in cancelled else answer == 2 * number + 2
        assert await scheduler.run_batched("a", 1, 9, doubled(runs)) == 18

    cases: list[tuple[set[int], list[list[int]]]] = [
        ({0}, [[2, 3, 4]]),
        ({1, 3}, [[1, 2, 3, 4]]),  # in one turn: the first goes on before the others learn of their end
        ({0, 1, 2}, [[4]]),
        ({0, 1, 2, 3}, []),
    ]
    for cancelled, ran in cases:
        runs: list[list[int]] = []
        asyncio.run(scenario(cancelled, runs))
        assert runs == [*ran, [9]]


def test_cancelled_requests_leave_no_model_open(scheduler: Scheduler) -> None:
    async def scenario() -> "weakref.ref[Callable[[list[int]], list[int]]]":
        run = doubled([])
        tasks = [asyncio.create_task(scheduler.run_batched("a", 1, number, run)) for number in range(2)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return weakref.ref(run)

    found = asyncio.run(scenario())
    gc.collect()
    assert found() is None


def test_close_waits_for_running_work() -> None:
    async def scenario() -> bool:
        scheduler, gate = Scheduler(1, live_settings()), threading.Event()
        task = asyncio.create_task(scheduler.run(LARGE, gate.wait))
        await asyncio.sleep(0)
        threading.Timer(0.05, gate.set).start()
        scheduler.close()
        assert gate.is_set()
        return await task

    assert asyncio.run(scenario())
