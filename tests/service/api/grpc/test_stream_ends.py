"""Ends of gRPC streams and calls: time limits, readers that leave, and the shutdown of the server."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.open_inference import OWN_CONNECTION, infer_message, open_stub
from tests.support.scrapes import read_metrics, wait_for_streams
from tests.support.servers import OwnServer, Server, serve

IDLE, TOTAL = 1, 3


@pytest.fixture(scope="module")
def server(tiny_repository: Path) -> Iterator[Server]:
    """Serve with one second for the next message of a stream, and three for the stream."""
    limits = {"PREBLOCK_STREAM_IDLE_TIMEOUT_SECONDS": str(IDLE), "PREBLOCK_STREAM_MAX_LIFETIME_SECONDS": str(TOTAL)}
    with serve(tiny_repository, **limits) as server:
        yield server


@pytest.fixture
def stub(server: Server) -> Iterator[Any]:
    with open_stub(server.grpc, OWN_CONNECTION) as stub:
        assert list(stub.ModelStreamInfer(iter([infer_message([[1]])]), wait_for_ready=True))
        yield stub


def until_the_end(stream: Any) -> tuple[list[Any], Any, float]:
    """Return the answers of a stream, its final error, and the seconds until then."""
    began, answers = time.monotonic(), []
    with pytest.raises(grpc.RpcError) as raised:
        answers.extend(stream)
    return answers, raised.value, time.monotonic() - began


def check(error: Any, got: str) -> None:
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == f"the stream was closed because of {got}; open a new one later, or on another server"
    assert dict(error.trailing_metadata())["retry-after"] == "1"


@contextmanager
def silent_stream(stub: Any, message: Any) -> Iterator[Any]:
    """Open a stream, and send one message, and then neither another nor the end before the block ends."""
    messages: SimpleQueue[Any] = SimpleQueue()
    messages.put(message)
    try:
        yield stub.ModelStreamInfer(iter(messages.get, None))
    finally:
        messages.put(None)


def test_idle_stream_ends_with_the_reason(stub: Any) -> None:
    with silent_stream(stub, infer_message([[1]])) as stream:
        answers, error, seconds = until_the_end(stream)
    assert [answer.error_message for answer in answers] == [""]
    check(error, "an idle timeout")
    assert seconds > 0.9 * IDLE


def test_stream_over_max_lifetime_ends_with_its_offsets(stub: Any) -> None:
    done: list[bool] = []
    message = infer_message([[1]])
    message.parameters["sequence_id"].int64_param = 5
    message.parameters["sequence_start"].bool_param = True

    def busy() -> Iterator[Any]:
        while not done:
            yield message
            time.sleep(0.1)

    (*answers, last), error, seconds = until_the_end(stub.ModelStreamInfer(busy()))
    done.append(True)
    assert {answer.error_message for answer in answers} == {""}
    place = {"model_name": "gpt", "model_version": "1", "sequence_id": 5, "next_offset": [1]}
    assert json.loads(last.error_message) == {"closing": "time", "sequences": [place]}
    check(error, "the maximum lifetime of a stream")
    assert seconds > 0.9 * TOTAL


def test_stream_without_a_reader_ends_with_its_connection(server: Server, stub: Any) -> None:
    large = infer_message([[1] * 6] * 10_000)  # 50 answers take more than the buffers of a connection
    with httpx.Client(base_url=server.address) as http:
        before = tokens_of(http)
        stream = stub.ModelStreamInfer(iter([large] * 50))
        wait_for_streams(http, 1)
        wait_for_streams(http, 0)
        assert 0 < tokens_of(http) - before < 25 * 60_000  # of 50 times 60,000
        _, error, _ = until_the_end(stream)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=20).ready


def tokens_of(http: httpx.Client) -> float:
    return read_metrics(http).get(("preblock_tokens_total", "gpt"), 0)


NOTHING_WAITS_SECONDS = 8
"""Below the limit of 10 s for the end of a call, and far above its usual time."""


def request(rows: int) -> Any:
    return infer_message(np.zeros((rows, 1)), id=str(rows))


@contextmanager
def connected(repository: Path) -> Iterator[tuple[OwnServer, Any]]:
    with serve(repository) as server, grpc.insecure_channel(server.grpc) as channel:
        grpc.channel_ready_future(channel).result(30)
        yield server, channel


def end(server: OwnServer, then: Callable[[], Any] = lambda: None) -> Any:
    """Stop a server, do something meanwhile, and check for a prompt end."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    found = then()
    assert server.process.wait(30) == 0
    assert time.monotonic() - began < NOTHING_WAITS_SECONDS
    return found


def test_idle_grpc_streams_end_at_shutdown_without_delay(tiny_repository: Path) -> None:
    with connected(tiny_repository) as (server, channel):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        names = "", "inference.GRPCInferenceService"
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]
        assert [next(watch).status for watch in watches] == [health_pb2.HealthCheckResponse.SERVING] * 2
        with silent_stream(stub, request(1)) as stream:
            assert next(stream).infer_response.id == "1"
            _, error, _ = end(server, lambda: until_the_end(stream))
        check(error, "the shutdown of the server")
        assert [next(watch).status for watch in watches] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2


def test_calls_in_flight_finish_at_shutdown(tiny_repository: Path) -> None:
    with connected(tiny_repository) as (server, channel):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(request(1))
        futures = [stub.ModelInfer.future(request(60000)) for _ in range(6)]
        stream = stub.ModelStreamInfer(iter([request(50000), request(2)]))
        assert next(stream).infer_response.id == "50000"
        answers = end(server, lambda: [future.result() for future in futures])
    assert {len(answer.raw_output_contents[0]) for answer in answers} == {60000 * 16}
