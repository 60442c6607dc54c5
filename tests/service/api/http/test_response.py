"""The server computes nothing for a deaf or disconnected client. Oracle: the counter of tokens."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.service.api.http.streaming.test_stream_ends import floods, memory_of
from tests.support.connections import dial
from tests.support.open_inference import infer_message
from tests.support.scrapes import read_metrics, wait_for_streams
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until


def tokens_of(http: httpx.Client, model: str) -> float:
    """Return the number of embedded tokens of a model."""
    return read_metrics(http).get(("preblock_tokens_total", model), 0)


@pytest.fixture(scope="module")
def calm(model_repository: Path) -> Iterator[Server]:
    """Serve with memory and counters of its own."""
    with serve(model_repository) as running, httpx.Client(base_url=running.address) as http:
        assert http.get("/readyz").status_code == 200
        yield running


def wait_until_nothing_is_computed(http: httpx.Client, begin: float = -1) -> float:
    """Return the number of embedded tokens once it exceeds `begin` and stays the same."""
    seen = [-1.0]

    def stands_still() -> bool:
        seen.append(tokens_of(http, "gpt2-small"))
        return seen[-1] == seen[-2] and seen[-1] > begin

    wait_until(stands_still, pause=0.3)
    return seen[-1]


@pytest.mark.parametrize("protocol", ["socket", "lines", "events"])
def test_nothing_is_computed_for_unread_or_closed_stream(calm: Server, protocol: str) -> None:
    first, again = floods()[protocol]
    url = httpx.URL(calm.address)
    assert url.port is not None
    with httpx.Client(base_url=calm.address, timeout=20) as http:
        begin, memory = tokens_of(http, "gpt2-small"), memory_of(calm)
        with dial(url) as deaf:
            deaf.sendall(first)
            wait_for_streams(http, 1)
            deaf.settimeout(0.3)
            with suppress(TimeoutError):
                deaf.sendall(again * 60)
            held_back = wait_until_nothing_is_computed(http, begin)
            assert 500 <= held_back - begin < 30_000  # of 60,000 requested tokens, 184 MB
            assert memory_of(calm) - memory < 64 * 2**20
        time.sleep(0.3)
        # Work in flight may end.
        assert wait_until_nothing_is_computed(http) - held_back <= 2000


def test_unread_grpc_stream_is_paused(calm: Server) -> None:
    request = infer_message([[1] * 1000], "gpt2-small")
    with httpx.Client(base_url=calm.address, timeout=20) as http:
        begin, memory = tokens_of(http, "gpt2-small"), memory_of(calm)
        with grpc.insecure_channel(calm.grpc) as channel:
            call = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            )(iter([request] * 60))
            held_back = wait_until_nothing_is_computed(http, begin)
            assert 500 <= held_back - begin < 30_000
            assert memory_of(calm) - memory < 64 * 2**20
            call.cancel()
        assert wait_until_nothing_is_computed(http) - held_back <= 2000


@pytest.mark.parametrize("encoding", ["prompt_embeds", "base64", "float"])
def test_unread_prompt_responses_use_no_memory(calm: Server, encoding: str) -> None:
    fields = {"input_ids": [[1] * 1024] * 64, "output": "token_embeddings", "encoding": encoding}
    with httpx.Client(base_url=calm.address, timeout=20) as http:
        memory = memory_of(calm)
        with http.stream("POST", "/models/gpt2-small/embed", json=fields) as answer:
            assert answer.status_code == 200
            next(answer.iter_raw())
            assert memory_of(calm) - memory < 64 * 2**20  # of 268 MB of text at least
        assert http.get("/readyz").status_code == 200
