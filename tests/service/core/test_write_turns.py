"""Turns of large responses: one chunk in each iteration of the event loop."""

import asyncio

import pytest

from preblock.service.core.write_turns import WriteTurns


@pytest.mark.parametrize("responses", [1, 2, 5])
def test_one_chunk_is_written_per_iteration(responses: int) -> None:
    async def scenario() -> None:
        turns, iteration, written = WriteTurns(), 0, []

        async def respond(number: int) -> None:
            await turns.wait(next_chunk=False)
            for _ in range(4):
                written.append((iteration, number))
                await turns.wait()

        tasks = [asyncio.create_task(respond(number)) for number in range(responses)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            iteration += 1
        iterations = [when for when, _ in written]
        assert len(set(iterations)) == len(iterations) == 4 * responses
        assert sorted(number for _, number in written) == sorted([*range(responses)] * 4)

    asyncio.run(scenario())


def test_turn_of_cancelled_response_goes_to_next() -> None:
    async def scenario() -> None:
        turns = WriteTurns()
        await turns.wait(next_chunk=False)
        left, other = (asyncio.create_task(turns.wait()) for _ in range(2))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait_for(other, 5)

    asyncio.run(scenario())
