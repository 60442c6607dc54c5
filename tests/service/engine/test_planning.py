"""Requests of a real server in shared runs of a model.

Oracles: each request alone, and the counters.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from websockets.sync.client import connect

from tests.support.decode_protocols import FRAME, step_frame
from tests.support.protocols import Clients, grpc_raw, native_bytes, open_inference_json
from tests.support.protocols import connect as connect_clients
from tests.support.servers import serve

STREAMS, STEPS = 16, 60
IDS = [[1 + (stream + step) % 6 for step in range(STEPS)] for stream in range(STREAMS)]


@pytest.fixture(scope="module")
def wide_clients(wide_repository: Path) -> Iterator[Clients]:
    """Connect to a server of this module, whose runs are counted."""
    with serve(wide_repository) as server, connect_clients(server) as connected:
        yield connected


def runs_and_rows(http: httpx.Client, model: str) -> tuple[int, int]:
    """Return how often a model ran, and how many rows were answered."""
    (found,) = http.get(f"/v2/models/{model}/versions/1/stats").json()["model_stats"]
    return int(found["execution_count"]), int(found["inference_count"])


def test_steps_of_many_streams_share_runs(wide_clients: Clients) -> None:
    before = runs_and_rows(wide_clients.http, "gpt")
    found: list[list[bytes]] = [[] for _ in range(STREAMS)]
    with ExitStack() as stack:
        address = f"{wide_clients.socket}/models/gpt/decode"
        streams = [stack.enter_context(connect(f"{address}?offset={7 * number}")) for number in range(STREAMS)]
        for step in range(STEPS):
            for stream, ids in zip(streams, IDS, strict=True):
                stream.send(step_frame([ids[step]]))
            for stream, answers in zip(streams, found, strict=True):
                answer = stream.recv()
                assert isinstance(answer, bytes)
                answers.append(answer[FRAME.size + 16 :])
    runs, rows = np.subtract(runs_and_rows(wide_clients.http, "gpt"), before)
    assert rows == STREAMS * STEPS
    assert runs < rows
    whole = native_bytes(wide_clients, "gpt", {"input_ids": IDS, "offset": [7 * n for n in range(STREAMS)]})
    assert b"".join(b"".join(answers) for answers in found) == whole.tobytes()


def test_concurrent_protocols_equal_single_requests(wide_clients: Clients) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 20, 60).tolist()
    asked = [{"input_ids": [random.integers(0, 50, length).tolist()], "offset": 3 * length} for length in lengths]
    protocols = [native_bytes, open_inference_json, grpc_raw]

    def ask(index: int) -> bytes:
        return protocols[index % len(protocols)](wide_clients, "gpt", asked[index]).tobytes()

    alone = [ask(index) for index in range(len(asked))]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(len(asked)))) == alone
