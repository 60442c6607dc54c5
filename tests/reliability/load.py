"""Load on a server with several processes, and its processes."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event

import httpx

from tests.reliability.wires import IDS
from tests.support.processes import alive, workers
from tests.support.servers import OwnServer, Server, serve
from tests.support.waiting import wait_until

BYTES = {"Accept": "application/octet-stream"}


def listening(port: str) -> int:
    """Return how many sockets listen on a port: for gRPC, each worker has one of its own, late in its start."""
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return len([own for _, own, _, state, *_ in sockets if own.endswith(f":{int(port):04X}") and state == "0A"])


def descriptors(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/fd").iterdir())


wait_for = partial(wait_until, seconds=120, pause=0.05)


def answers(server: Server) -> bool:
    with suppress(OSError, httpx.HTTPError):
        return httpx.get(f"{server.address}/readyz", timeout=5).status_code == 200
    return False


def ready(server: Server) -> bool:
    """Return whether both workers have started; before that, a start may fail."""
    own = server.grpc.rpartition(":")[2]
    return len(workers(server.pid)) == listening(own) == 2 and answers(server)


@contextmanager
def serve_two(repository: Path, *options: str, **environment: str) -> Iterator[OwnServer]:
    """Serve with two workers, and begin once both are ready."""
    with serve(repository, "--workers", "2", *options, **environment) as server:
        wait_for(partial(ready, server))
        yield server


def ended(processes: list[int]) -> bool:
    return not any(map(alive, processes))


def replaced(server: Server, before: list[int]) -> bool:
    return len(set(workers(server.pid)) - set(before)) == 1


@dataclass
class Load:
    """Answers to clients under load: right, wrong or broken off, and the seconds of the slowest."""

    right: int = 0
    broken: int = 0
    slowest: float = 0.0
    wrong: list[object] = field(default_factory=list)

    def answered(self, count: int) -> bool:
        return self.right > count


@contextmanager
def load(server: Server, expected: bytes, clients: int = 8, pause: float = 0, outage: bool = False) -> Iterator[Load]:
    """Ask over several connections during a block, and open each again after an error.

    Each asks again at once, or after a pause in seconds, to leave processors to starting workers. If all workers may be
    missing for a while, `outage` accepts the refusals of the parent: each client waits as `Retry-After` says.
    """
    seen, over = Load(), Event()

    def ask() -> None:
        with httpx.Client(base_url=server.address, timeout=60) as client:
            while not over.wait(pause):
                began = time.monotonic()
                try:
                    answer = client.post("/models/gpt/embed", json={"input_ids": [IDS], "offset": 2}, headers=BYTES)
                except httpx.HTTPError:
                    seen.broken += 1
                    time.sleep(0.05)
                    continue
                seen.slowest = max(seen.slowest, time.monotonic() - began)
                if (answer.status_code, answer.content) == (200, expected):
                    seen.right += 1
                elif outage and answer.status_code == 503 and answer.json()["field"] == "workers":
                    over.wait(int(answer.headers["Retry-After"]))
                else:
                    seen.wrong.append((answer.status_code, answer.content[:200]))

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask) for _ in range(clients)]
        try:
            yield seen
        finally:
            over.set()
    for asked in asking:
        asked.result()


@contextmanager
def asking_meanwhile(server: Server, expected: bytes) -> Iterator[None]:
    """Send good requests during a block, each answered with the right bits, soon."""
    with load(server, expected, 1, 0.05) as seen:
        yield
        wait_for(partial(seen.answered, seen.right))  # the block may have been short
    assert not seen.wrong
    assert not seen.broken
    assert seen.slowest < 10
