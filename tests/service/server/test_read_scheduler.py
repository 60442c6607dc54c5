"""Order in which connections with large input are read."""

import asyncio

from preblock.service.core.large_bodies import LARGE_BODY_BYTES
from preblock.service.server.read_scheduler import CHUNK_BYTES, ReadScheduler, ReadTurns

CHUNKS = 64
LAST = -CHUNKS * CHUNK_BYTES
"""Size before the input; the message stays small."""


class Connection(asyncio.Transport):
    """A connection with input; it records its name for each chunk read.

    Args:
        name: the name.
        turns: of all connections.
        received: bytes of its message before the input.
        chunks: names of all connections, in the order of their chunks.

    """

    def __init__(self, name: str, turns: ReadTurns, received: int, chunks: list[str]) -> None:
        super().__init__()
        self._name, self._received, self._chunks = name, received, chunks
        self.failures = 0
        self._is_closing = False
        self.scheduler = ReadScheduler(self, turns, self._read, lambda: self._received, self._fail)
        self.scheduler.pause()
        self.scheduler.feed(bytes(CHUNKS * CHUNK_BYTES))

    def _read(self, data: bytes) -> None:
        if self._name == "broken":
            raise RuntimeError(self._name)
        self._received += len(data)
        self._chunks.append(self._name)

    def _fail(self) -> None:
        self.failures += 1
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def read_all(received: dict[str, int]) -> list[str]:
    """Return the names of connections in the order of their chunks, by the bytes received before."""
    turns = ReadTurns(asyncio.get_running_loop())
    chunks: list[str] = []
    connections = [Connection(name, turns, size, chunks) for name, size in received.items()]
    for connection in connections:
        connection.scheduler.resume()
    while len(chunks) < CHUNKS * len(connections):
        await asyncio.sleep(0)
    return chunks


def test_largest_message_is_read_to_its_end_first() -> None:
    chunks = asyncio.run(read_all({"third": LARGE_BODY_BYTES, "first": 2**24, "second": 2**23}))
    assert chunks == ["first"] * CHUNKS + ["second"] * CHUNKS + ["third"] * CHUNKS


def test_small_message_has_every_second_turn() -> None:
    chunks = asyncio.run(read_all({"large": 2**24, "larger": 2**25, "small": LAST}))
    assert chunks[: 2 * CHUNKS] == ["larger", "small"] * CHUNKS
    assert chunks[2 * CHUNKS :] == ["large"] * CHUNKS


def test_small_messages_take_turns() -> None:
    assert asyncio.run(read_all({"a": LAST, "b": LAST, "c": LAST})) == ["a", "b", "c"] * CHUNKS


def test_failing_connection_does_not_stop_others() -> None:
    async def run() -> tuple[list[str], int]:
        turns, chunks = ReadTurns(asyncio.get_running_loop()), list[str]()
        broken, other = (Connection(name, turns, LAST, chunks) for name in ("broken", "other"))
        broken.scheduler.resume()
        other.scheduler.resume()
        other.scheduler.feed(b"x")  # reads the waiting input of both
        while len(chunks) < CHUNKS + 1:
            await asyncio.sleep(0)
        return chunks, broken.failures

    assert asyncio.run(run()) == (["other"] * (CHUNKS + 1), 1)
