"""Sequences over HTTP and gRPC, by an unmodified tritonclient. Oracle: the native API with offsets."""

import asyncio
import json
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.clients.test_tritonclient import client_of, module
from tests.clients.triton_client import TritonClient
from tests.e2e.sequence_calls import STEPS, check, request, sequences_open, wait_for_sequences
from tests.e2e.triton_stream import streaming
from tests.support.processes import status_bytes
from tests.support.protocols import Clients, RequestRefused, call_grpc, connect, native_bytes
from tests.support.scrapes import wait_for_streams
from tests.support.servers import Server, serve

__all__ = ["module"]


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


def test_json_request_continues_sequence_of_grpc_request(counted_clients: Clients) -> None:
    def infer(http: httpx.Client, **told: Any) -> list[float]:
        tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}
        body = {"inputs": [tensor], "parameters": {"sequence_id": 2**64 - 1, **told}}
        answer = http.post("/v2/models/gpt/infer", json=body)
        answer.raise_for_status()
        return answer.json()["outputs"][0]["data"]  # type: ignore[no-any-return]

    message = request([[1, 2]], 0, sequence_start=True)
    message.parameters["sequence_id"].uint64_param = 2**64 - 1
    call_grpc(counted_clients, "ModelInfer", message)
    found = np.array([infer(counted_clients.http), infer(counted_clients.http, sequence_end=True)], np.float32)
    expected = native_bytes(counted_clients, "gpt", {"input_ids": [[1, 1]], "offset": 2})
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("id_", [5, "a sequence"])
def test_grpc_streams_have_separate_sequences(counted_server: Server, counted_clients: Clients, id_: int | str) -> None:
    with streaming(counted_server) as stream, streaming(counted_server) as other:
        for ids, told, _ in STEPS:  # without waiting: answers keep the order of requests
            stream.send(ids, id_, **told)
        check([stream.recv() for _ in STEPS], id_, counted_clients)
        first = stream.ask([[1]], id_, sequence_start=True)
        assert str(other.ask([[1]], id_)).startswith("parameters.sequence_id ")
        assert other.ask([[1]], id_, sequence_start=True) == first
        assert sequences_open(counted_clients.http) == 2
    wait_for_sequences(counted_clients.http, 0)


def test_aio_client_stream_continues_sequence(counted_server: Server, counted_clients: Clients) -> None:
    asked = TritonClient(tritonclient.grpc.aio, "")

    async def requests() -> Any:
        for ids, told, _ in STEPS:
            yield {"model_name": "gpt", "inputs": asked.inputs(input_ids=ids), "sequence_id": 5, **told}

    async def run() -> list[bytes | str]:
        async with tritonclient.grpc.aio.InferenceServerClient(counted_server.grpc) as streaming:
            return [
                str(error.message()) if error else result.as_numpy("embeddings").tobytes()
                async for result, error in streaming.stream_infer(requests())
            ]

    check(asyncio.run(run()), 5, counted_clients)


def test_sequence_ids_are_separate_per_version(counted_server: Server, counted_clients: Clients) -> None:
    with streaming(counted_server) as stream:
        versions = [{"model_version": "1"}, {"model_version": "2"}, {}]
        for rows, told in enumerate(versions[:2], 1):
            stream.ask([[1] * rows], 5, "bert", sequence_start=True, **told)
        for offset, told in ((1, versions[0]), (2, versions[2]), (3, versions[1])):
            version = told.get("model_version", "2")
            expected = native_bytes(counted_clients, f"bert/versions/{version}", {"input_ids": [[3]], "offset": offset})
            assert stream.ask([[3]], 5, "bert", **told) == expected.tobytes()


def test_statistics_count_sequence_requests(counted_server: Server, counted_clients: Clients) -> None:
    def counts() -> tuple[int, int, int]:
        (model,) = counted_clients.http.get("/v2/models/gpt/stats").json()["model_stats"]
        stats = model["inference_stats"]
        return model["inference_count"], stats["success"]["count"], stats["fail"]["count"]

    before = counts()
    with streaming(counted_server) as stream:
        stream.ask([[1], [2]], 5, sequence_start=True)
        stream.ask([[1], [2]], 5)
        stream.ask([[7], [2]], 5)
    assert tuple(np.subtract(counts(), before)) == (4, 2, 1)


def test_configuration_has_no_sequence_batching(counted_clients: Clients) -> None:
    assert "sequence_batching" not in counted_clients.http.get("/v2/models/gpt/config").json()


@pytest.mark.parametrize("leave", ["cancel", "disconnect"])
def test_cancelled_or_closed_stream_releases_its_sequences(
    counted_clients: Clients, counted_server: Server, leave: str
) -> None:
    wait_for_sequences(counted_clients.http, 0)
    channel = grpc.insecure_channel(counted_server.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
    waiting: queue.Queue[Any] = queue.Queue()
    for id_ in (5, 6):
        waiting.put(request([[1]], id_, sequence_start=True))
    method = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )
    answers: Any = method(iter(waiting.get, None))
    assert [next(answers).error_message for _ in range(2)] == ["", ""]
    assert sequences_open(counted_clients.http) == 2
    if leave == "cancel":
        answers.cancel()
    channel.close()
    wait_for_sequences(counted_clients.http, 0)
    waiting.put(None)


@pytest.fixture(scope="module")
def strict(tiny_repository: Path) -> Iterator[tuple[Server, Clients]]:
    """A server of short patience and little room."""
    limits = {
        "PREBLOCK_STREAM_IDLE_TIMEOUT_SECONDS": "1",
        "PREBLOCK_SEQUENCE_IDLE_TIMEOUT_SECONDS": "1",
        "PREBLOCK_MAX_SEQUENCE_ROWS": "3",
    }
    with serve(tiny_repository, "--max-stream-sequence-rows", "2", **limits) as server, connect(server) as clients:
        yield server, clients


def test_sequence_rows_over_limit_return_unavailable(strict: tuple[Server, Clients]) -> None:
    server, clients = strict
    with streaming(server) as stream:
        for id_ in (1, 2):
            assert isinstance(stream.ask([[1]], id_, sequence_start=True), bytes)
        assert stream.ask([[1]], 3, sequence_start=True) == (
            "input_ids: 1 rows beside 2 that run exceed the limit of 2 rows of sequences"
        )
        call_grpc(clients, "ModelInfer", request([[1]], 1, sequence_start=True))
        with pytest.raises(RequestRefused) as refused:
            call_grpc(clients, "ModelInfer", request([[1]], 2, sequence_start=True))
        assert refused.value.status == "StatusCode.UNAVAILABLE"
        tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1]}
        told = {"sequence_id": "x", "sequence_start": True}
        answer = clients.http.post("/v2/models/gpt/infer", json={"inputs": [tensor], "parameters": told})
        assert answer.status_code == 503
        assert answer.json()["error"].startswith("input_ids: 1 rows beside 3 that run exceed the limit of 3 rows")
    wait_for_sequences(clients.http, 0)


def test_idle_sequences_are_removed(strict: tuple[Server, Clients]) -> None:
    server, clients = strict
    call_grpc(clients, "ModelInfer", request([[1]], 9, sequence_start=True))
    with streaming(server) as stream:
        stream.ask([[1]], 1, sequence_start=True)
        for _ in range(5):
            time.sleep(0.4)
            assert isinstance(stream.ask([[2]], 2, sequence_start=True), bytes)  # the stream is not idle
        assert sequences_open(clients.http) == 1
        assert str(stream.ask([[1]], 1)).startswith("parameters.sequence_id 1 does not run on ")
        with pytest.raises(RequestRefused, match=r"parameters\.sequence_id 9 does not run on gpt"):
            call_grpc(clients, "ModelInfer", request([[1]], 9))
        assert str(stream.recv()).startswith("the stream was closed because of an idle timeout")
        with pytest.raises(InferenceServerException, match="no longer in valid state"):
            stream.send([[1]], 1)
    wait_for_streams(clients.http, 0)


def test_unread_stream_is_throttled_and_its_sequences_end(model_repository: Path) -> None:
    message = request([[1] * 1000], 5, sequence_start=True)
    message.model_name = "gpt2-small"

    def flood() -> Iterator[Any]:
        for _ in range(100):  # each is answered with 3 MB
            yield message.SerializeToString()
        time.sleep(2)

    with serve(model_repository, PREBLOCK_SEQUENCE_IDLE_TIMEOUT_SECONDS="1") as server, connect(server) as clients:
        with grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", -1)]) as channel:
            before = status_bytes(server.pid, "VmRSS")
            answers: Any = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(flood())
            next(answers)
            wait_for_sequences(clients.http, 1)
            wait_for_sequences(clients.http, 0)
            assert status_bytes(server.pid, "VmRSS") - before < 64 * 2**20
            answers.cancel()
        wait_for_streams(clients.http, 0)


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
        for module, address in (
            (tritonclient.http, clients.http.base_url.netloc.decode()),
            (tritonclient.grpc, server.grpc),
        ):
            asked = TritonClient(module, address)
            with pytest.raises(InferenceServerException, match=message):
                asked.infer("gpt", asked.inputs(input_ids=[[1]]), sequence_id=5, sequence_start=True)
        with streaming(server) as stream:
            for ids, told, _ in STEPS:
                stream.send(ids, 5, **told)
            check([stream.recv() for _ in STEPS], 5, clients)


def test_sequence_matches_stateless_requests_bit_for_bit(model_server: Server, model_clients: Clients) -> None:
    ids = np.random.default_rng(6).integers(0, 30000, 40)
    whole = native_bytes(model_clients, "gpt2-small", {"input_ids": [ids.tolist()]})
    parts = np.split(ids, [1, 2, 9, 10, 30])
    asked = TritonClient(tritonclient.grpc, model_server.grpc)
    offsets = np.cumsum([0, *map(len, parts)])
    stated = [
        asked.infer("gpt2-small", asked.inputs(input_ids=[part], offset=[offset])).as_numpy("embeddings")
        for part, offset in zip(parts, offsets, strict=False)
    ]
    with streaming(model_server) as stream:
        for index, part in enumerate(parts):
            stream.send([part], "x", "gpt2-small", sequence_start=not index, sequence_end=index == len(parts) - 1)
        found = [stream.recv() for _ in parts]
    assert b"".join(vectors.tobytes() for vectors in stated) == whole.tobytes()
    assert b"".join(bytes(part) for part in found if isinstance(part, bytes)) == whole.tobytes()
