"""Large bodies wait for the memory of others, and get status 503 after the queue timeout."""

import asyncio
from pathlib import Path

from preblock.service.core.large_bodies import LARGE_BODY_BYTES, MAX_LARGEST_BODIES
from preblock.service.core.settings import Settings
from tests.service.api.http.test_prepared import Served, run

LARGE = b'{"input_ids": [1]}'.ljust(LARGE_BODY_BYTES)


def ask_beside_others(served: Served) -> tuple[int, bytes]:
    """Send a large body while others hold all memory."""
    bodies = served.engine.limits.bodies

    async def release(held: int) -> None:
        bodies.release(held)

    held = asyncio.run(bodies.reserve(MAX_LARGEST_BODIES * LARGE_BODY_BYTES))
    try:
        status, _, content = served.ask(LARGE, "/models/gpt/embed")
        return status, content
    finally:
        asyncio.run(release(held))


def test_large_body_waits_for_memory(tiny_repository: Path) -> None:
    settings = Settings(repository=tiny_repository, max_body_bytes=LARGE_BODY_BYTES, queue_timeout_seconds=0.1)
    with run(settings) as served:
        for _ in range(2):  # the wait of the first attempt must not keep memory
            assert served.ask(LARGE, "/models/gpt/embed")[0] == 200
            status, content = ask_beside_others(served)
            assert (status, b"waited 0.1 s for other large" in content) == (503, True), content
        assert served.ask(LARGE, "/models/gpt/embed")[0] == 200
