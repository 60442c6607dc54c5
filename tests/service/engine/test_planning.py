"""Requests of a real server in shared runs of a model.

Oracles: each request alone, and the counters.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import numpy as np
from websockets.sync.client import connect

from tests.support.decode_protocols import FRAME, step_frame
from tests.support.protocols import Clients, grpc_raw, native_bytes, open_inference_json

STREAMS, STEPS = 16, 60
IDS = [[1 + (stream + step) % 6 for step in range(STEPS)] for stream in range(STREAMS)]


def runs_and_rows(http: httpx.Client, model: str) -> tuple[int, int]:
    """Return how often a model ran, and how many rows were answered."""
    (found,) = http.get(f"/v2/models/{model}/versions/1/stats").json()["model_stats"]
    return int(found["execution_count"]), int(found["inference_count"])


def test_steps_of_many_streams_share_runs(clients: Clients) -> None:
    before = runs_and_rows(clients.http, "gpt2-small")
    found: list[list[bytes]] = [[] for _ in range(STREAMS)]
    with ExitStack() as stack:
        address = f"{clients.socket}/models/gpt2-small/decode"
        streams = [stack.enter_context(connect(f"{address}?offset={7 * number}")) for number in range(STREAMS)]
        for step in range(STEPS):
            for stream, ids in zip(streams, IDS, strict=True):
                stream.send(step_frame([ids[step]]))
            for stream, answers in zip(streams, found, strict=True):
                answer = stream.recv()
                assert isinstance(answer, bytes)
                answers.append(answer[FRAME.size + 12 :])
    runs, rows = np.subtract(runs_and_rows(clients.http, "gpt2-small"), before)
    assert rows == STREAMS * STEPS
    assert runs < rows
    whole = native_bytes(clients, "gpt2-small", {"input_ids": IDS, "offset": [7 * n for n in range(STREAMS)]})
    assert b"".join(b"".join(answers) for answers in found) == whole.tobytes()


def test_concurrent_protocols_equal_single_requests(clients: Clients) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 20, 60).tolist()
    asked = [{"input_ids": [random.integers(0, 50000, length).tolist()], "offset": 3 * length} for length in lengths]
    protocols = [native_bytes, open_inference_json, grpc_raw]

    def ask(index: int) -> bytes:
        return protocols[index % len(protocols)](clients, "gpt2-small", asked[index]).tobytes()

    alone = [ask(index) for index in range(len(asked))]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(len(asked)))) == alone
