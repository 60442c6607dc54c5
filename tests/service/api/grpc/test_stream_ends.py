"""Time limits end a gRPC stream. The end of the server is in test_shutdown.py."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.support.open_inference import OWN_CONNECTION, infer_message, open_stub
from tests.support.scrapes import read_metrics, wait_for_streams
from tests.support.servers import Server, serve

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


def test_idle_stream_ends_with_the_reason(stub: Any) -> None:
    done: list[bool] = []

    def silent() -> Iterator[Any]:
        yield infer_message([[1]])
        while not done:
            time.sleep(0.05)

    answers, error, seconds = until_the_end(stub.ModelStreamInfer(silent()))
    done.append(True)
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
