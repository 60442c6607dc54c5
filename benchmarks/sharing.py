"""Processor time of requests in a micro-batch, against the same requests one after another.

    python -m benchmarks.sharing

Runs gpt2-small and minilm of `model_repository` in this process, without a protocol. Each request has one row. The
figures are medians of ratios; below 1, micro-batches are cheaper. The size limit of micro-batches, `MAX_BATCHED_VALUES`
in `service/engine/planning.py`, is lifted.
"""

import asyncio
import statistics
import time

import numpy as np
import uvloop

from preblock.service.core.settings import LiveSettings, Settings
from preblock.service.core.types import TokenRequest, TokenRows
from preblock.service.engine import planning
from preblock.service.engine.engine import Engine
from preblock.service.engine.scheduler import Scheduler
from preblock.service.observability.metrics import Metrics
from preblock.service.runtime.repository import Repository

LENGTHS, REQUESTS, ROUNDS = (1, 4, 16, 32, 64, 128), (2, 4, 16, 64), 15


async def measure(name: str) -> None:
    """Print a line of ratios for each number of concurrent requests."""
    settings = LiveSettings(Settings())
    asked = Engine(Repository(settings.current.repository), Scheduler(1, settings), Metrics(), settings)
    model = asked.repository.get(name)

    async def ask(length: int) -> None:
        rows = TokenRows(np.arange(length), np.array([length]))
        with asked.admission.request("native") as record:
            await asked.embed(model, TokenRequest(input_ids=rows, offset=np.array([7])), record)

    async def together(length: int, requests: int) -> None:
        await asyncio.gather(*(ask(length) for _ in range(requests)))

    async def apart(length: int, requests: int) -> None:
        for _ in range(requests):
            await asyncio.gather(ask(length))

    print(f"{name}: tokens of a request {LENGTHS}")
    for requests in REQUESTS:
        ratios = []
        for length in LENGTHS:
            rounds = []
            for _ in range(ROUNDS):
                seconds = []
                for way in (apart, together):
                    begin = time.process_time()
                    for _ in range(128 // requests):
                        await way(length, requests)
                    seconds.append(time.process_time() - begin)
                rounds.append(seconds[1] / seconds[0])
            ratios.append(statistics.median(rounds))
        print(f"{requests} requests at once: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


def main() -> None:
    """Measure both models."""
    planning.MAX_BATCHED_VALUES = 2**30
    for name in ("gpt2-small", "minilm"):
        uvloop.run(measure(name))


if __name__ == "__main__":
    main()
