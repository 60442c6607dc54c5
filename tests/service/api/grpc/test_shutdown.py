"""The end of a server over gRPC: calls in flight are answered, and waiting streams are closed with a reason."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2_grpc

from tests.support.open_inference import infer_message
from tests.support.servers import OwnServer, serve

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

        done: list[Any] = []

        def sent() -> Iterator[Any]:
            """Send one request, and then neither another nor the end."""
            yield request(1)
            while not done:
                time.sleep(0.05)

        streams = [stub.ModelStreamInfer(sent()) for _ in range(3)]
        assert [next(stream).infer_response.id for stream in streams] == ["1"] * 3
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING

        def end_of(stream: Any) -> Any:
            with pytest.raises(grpc.RpcError) as raised:
                next(stream)
            return raised.value

        try:
            ends = end(server, lambda: [*map(end_of, streams)])
        finally:
            done.append(True)
        assert {error.code() for error in ends} == {grpc.StatusCode.UNAVAILABLE}
        assert {error.details() for error in ends} == {
            "the stream was closed because of the shutdown of the server; open a new one later, or on another server"
        }
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_calls_in_flight_finish_at_shutdown(tiny_repository: Path) -> None:
    with connected(tiny_repository) as (server, channel):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(request(1))
        futures = [stub.ModelInfer.future(request(60000)) for _ in range(6)]
        stream = stub.ModelStreamInfer(iter([request(50000), request(2)]))
        assert next(stream).infer_response.id == "50000"
        answers = end(server, lambda: [future.result() for future in futures])
    assert {len(answer.raw_output_contents[0]) for answer in answers} == {60000 * 16}
