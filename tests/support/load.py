"""Clients for tests with failing servers: they repeat calls in threads, and compare every vector."""

import threading
import time
from collections.abc import Callable, Mapping

import httpx
import numpy as np

from preblock.client.sync_stream import DecodeStream
from tests.support.artifacts import Floats

STORED_GPT, VOCABULARY, POSITIONS = "gpt-50x64x600", 50, 600
"""The stored artifact of the functions below, and its sizes."""
STUCK_SECONDS = 5
"""A longer call waits for a silent server."""
PAUSE_SECONDS = 0.03
"""Pause between two calls."""


def expected(tables: Mapping[str, Floats], ids: object, offset: int = 0) -> Floats:
    """Return the vectors of rows of ids, all at one offset."""
    array = np.asarray(ids)
    vectors: Floats = tables["tokens"][array] + tables["positions"][offset : offset + array.shape[-1]]
    return vectors


def step(stream: DecodeStream, tables: Mapping[str, Floats]) -> int:
    """Feed one token, the first again after the last position, and compare its vector and the new offset."""
    (offset,) = stream.offset
    if offset == POSITIONS:
        stream.rewind(0)
        offset = 0
    token = offset % VOCABULARY
    assert np.array_equal(stream.step([token]), expected(tables, [[token]], offset))
    assert stream.offset == [offset + 1]
    return 200


def infer(http: httpx.Client, address: str, tables: Mapping[str, Floats]) -> int:
    """Send a request of the Open Inference Protocol, which HAProxy never sends again, and compare its vectors.

    Return the status; 0 if a proxy closed the connection. HAProxy does so for a request on a connection used before.
    """
    tensor = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [4, 2, 7]}
    try:
        answer = http.post(f"{address}/v2/models/gpt/infer", json={"inputs": [tensor]})
    except httpx.RemoteProtocolError:
        return 0
    if answer.status_code == 200:
        (output,) = (one for one in answer.json()["outputs"] if one["name"] == "embeddings")
        vectors = np.array(output["data"], np.float32).reshape(output["shape"])
        assert np.array_equal(vectors, expected(tables, [[4, 2, 7]]))
    return answer.status_code


class Load:
    """Repeats a call in a thread, and notes the failures.

    Attributes:
        done: number of successful calls.
        begun: start of the running call.
        failures: start and status of each failed call.

    """

    def __init__(self, call: Callable[[], int]) -> None:
        self._call, self._ended = call, threading.Event()
        self.done, self.begun = 0, time.monotonic()
        self.failures: list[tuple[float, int]] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        return time.monotonic() - self.begun > STUCK_SECONDS

    def end(self) -> None:
        """End after the running call; raise its error."""
        self._ended.set()
        self._thread.join(60)
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        try:
            while not self._ended.wait(PAUSE_SECONDS):
                self.begun = time.monotonic()
                status = self._call()
                if status == 200:
                    self.done += 1
                else:
                    self.failures.append((self.begun, status))
        except BaseException as error:
            self._errors.append(error)
