"""Large messages of a decode stream share the bound of large request bodies."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from preblock.service.api.http.streaming import DecodeSession
from preblock.service.core.large_bodies import LARGE_BODY_BYTES, MAX_LARGEST_BODIES
from tests.service.api.http.streaming.frames import step
from tests.support.engines import open_engine

TEXT, FRAME = b'{"input_ids": [1, 2]}', step([[]])
SETTINGS: dict[str, Any] = {"max_body_bytes": LARGE_BODY_BYTES, "queue_timeout_seconds": 0.05}


@pytest.mark.parametrize("kind", ["text", "frame"])
def test_only_large_decode_message_waits_for_memory(kind: str, tiny_repository: Path) -> None:
    async def scenario() -> tuple[bytes, bytes, bytes]:
        with open_engine(tiny_repository, **SETTINGS) as engine:
            session = DecodeSession(engine, engine.repository.get("gpt"), {})
            answer = session.answer_text if kind == "text" else session.answer_frame
            small = TEXT if kind == "text" else FRAME
            large = small.ljust(LARGE_BODY_BYTES) if kind == "text" else small + bytes(LARGE_BODY_BYTES)
            held = await engine.limits.bodies.reserve(MAX_LARGEST_BODIES * LARGE_BODY_BYTES)
            answers = await answer(small), await answer(large)
            engine.limits.bodies.release(held)
            return *answers, await answer(large)

    small, waited, after = asyncio.run(scenario())
    message = b"The body waited 0.05 s for other large request bodies. Retry later."
    assert message not in small
    assert message in waited
    assert message not in after
    if kind == "text":
        assert json.loads(waited)["error"]["status"] == 503
        assert json.loads(waited)["error"]["retry_after"] == 1
        assert json.loads(after)["next_offset"] == [4]
