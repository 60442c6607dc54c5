"""Sequences over HTTP and gRPC, by an unmodified tritonclient. Oracle: the native API with offsets."""

import json
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.clients.test_tritonclient import client_of, module
from tests.clients.triton_client import TritonClient
from tests.support.protocols import Clients, connect, native_bytes
from tests.support.scrapes import read_metrics
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

__all__ = ["module"]

STEPS: list[tuple[list[list[int]], dict[str, Any], int | str]] = [
    ([[1, 2]], {"sequence_start": True}, 0),
    ([[3]], {}, 2),
    ([[7]], {}, "input_ids[0][0]: got 7, expected 0 to 6"),
    ([[4]], {"parameters": {"offset": 2}}, "offset[0]: got 2, expected 3, the offset of this row"),
    ([[4], [4]], {}, "input_ids: got 2 rows, expected one row, as are running"),
    ([[4, 5, 6, 1]], {}, "offset[0] + tokens: got 3 + 4 = 7, expected at most 6, the max_len of this model"),
    ([[4, 5, 6]], {"parameters": {"offset": 3}}, 3),
    ([[1]], {}, "offset[0] + tokens: got 6 + 1 = 7, expected at most 6, the max_len of this model"),
    ([[1]], {"sequence_start": True, "parameters": {"offset": 4}}, 4),
    ([[2]], {"sequence_end": True}, 5),
    (
        [[2]],
        {},
        "parameters.sequence_id ID does not run on gpt version 1; its first request has ",
    ),
]
"""Ids, parameters of the sequence, and the offset of the row or the error."""


def check(answers: list[bytes | str], id_: int | str, clients: Clients) -> None:
    """Compare the vectors, or the error, of each of STEPS."""
    for (ids, _, expected), found in zip(STEPS, answers, strict=True):
        if isinstance(expected, str):
            assert isinstance(found, str)
            assert found.startswith(expected.replace("ID", repr(id_)))
        else:
            assert found == native_bytes(clients, "gpt", {"input_ids": ids, "offset": expected}).tobytes()


def sequences_open(http: httpx.Client) -> float:
    return read_metrics(http)["preblock_sequences_open",]


def wait_for_sequences(http: httpx.Client, count: int) -> None:
    wait_until(lambda: sequences_open(http) == count)


class TritonStream:
    """A stream of the synchronous client, with its answers."""

    def __init__(self, server: Server) -> None:
        self._answers: queue.Queue[Any] = queue.Queue()
        self.client = tritonclient.grpc.InferenceServerClient(server.grpc)
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def send(self, ids: Any, id_: int | str, model: str = "gpt", **told: Any) -> None:
        inputs = TritonClient(tritonclient.grpc, "").inputs(input_ids=ids)
        self.client.async_stream_infer(model, inputs, sequence_id=id_, **told)

    def recv(self) -> bytes | str:
        result, error = self._answers.get(timeout=30)
        return str(error.message()) if error else result.as_numpy("embeddings").tobytes()

    def ask(self, *args: Any, **told: Any) -> bytes | str:
        self.send(*args, **told)
        return self.recv()


@contextmanager
def streaming(server: Server, cancel: bool = False) -> Iterator[TritonStream]:
    stream = TritonStream(server)
    try:
        yield stream
    finally:
        stream.client.stop_stream(cancel_requests=cancel)
        stream.client.close()


@pytest.mark.parametrize("id_", [5, "a sequence"])
def test_separate_requests_continue_their_sequence(
    module: ModuleType, counted_server: Server, counted_clients: Clients, id_: int | str
) -> None:
    client, answers = client_of(module, counted_server), list[bytes | str]()
    for ids, told, _ in STEPS:
        try:
            result = client.infer("gpt", client.inputs(input_ids=ids), sequence_id=id_, **told)
            answers.append(result.as_numpy("embeddings").tobytes())
        except InferenceServerException as error:
            answers.append(str(error.message()))
    check(answers, id_, counted_clients)
    assert sequences_open(counted_clients.http) == 0


@pytest.mark.parametrize("id_", [5, "a sequence"])
def test_grpc_streams_have_separate_sequences(counted_server: Server, counted_clients: Clients, id_: int | str) -> None:
    with streaming(counted_server) as stream, streaming(counted_server, cancel=True) as other:
        for ids, told, _ in STEPS:  # without waiting: answers keep the order of requests
            stream.send(ids, id_, **told)
        check([stream.recv() for _ in STEPS], id_, counted_clients)
        first = stream.ask([[1]], id_, sequence_start=True)
        assert str(other.ask([[1]], id_)).startswith("parameters.sequence_id ")
        assert other.ask([[1]], id_, sequence_start=True) == first
        assert sequences_open(counted_clients.http) == 2
    wait_for_sequences(counted_clients.http, 0)


def test_shutdown_reports_offsets_of_sequences(tiny_repository: Path) -> None:
    with serve(tiny_repository) as server, connect(server), streaming(server) as stream, streaming(server) as other:
        stream.ask([[1], [2]], "a", sequence_start=True)
        stream.ask([[1, 2]], 5, "bert", sequence_start=True, model_version="1")
        other.ask([[1]], 0)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert json.loads(stream.recv()) == {
            "closing": "shutdown",
            "sequences": [
                {"model_name": "gpt", "model_version": "1", "sequence_id": "a", "next_offset": [1, 1]},
                {"model_name": "bert", "model_version": "1", "sequence_id": 5, "next_offset": [2]},
            ],
        }
        for end in (stream.recv(), other.recv()):
            assert str(end).startswith("the stream was closed because of the shutdown of the server")
        server.process.wait(20)
        assert time.monotonic() - begin < 9  # less than the grace of requests in flight


def test_sequence_without_stream_needs_single_worker(tiny_repository: Path) -> None:
    with serve(tiny_repository, "--workers", "2") as server, connect(server) as clients:
        message = "parameters.sequence_id needs a single worker: any of the 2 workers here may get the next request"
        asked = TritonClient(tritonclient.grpc, server.grpc)
        with pytest.raises(InferenceServerException, match=message):
            asked.infer("gpt", asked.inputs(input_ids=[[1]]), sequence_id=5, sequence_start=True)
        with streaming(server) as stream:
            for ids, told, _ in STEPS:
                stream.send(ids, 5, **told)
            check([stream.recv() for _ in STEPS], 5, clients)
