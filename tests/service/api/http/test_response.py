"""What the server does for a client that does not read, or has left: nothing. Oracle: the counter of tokens."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2

from tests.service.api.http.routes.test_decode import wait_for_streams
from tests.service.api.http.streaming.test_stream_ends import floods, memory_of
from tests.support.connections import dial
from tests.support.servers import Server, serve


def tokens_of(http: httpx.Client, model: str) -> float:
    """Return how many tokens of a model were embedded."""
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "preblock_tokens_total" and sample.labels == {"model": model}:
                return sample.value
    return 0


@pytest.fixture(scope="module")
def calm(repository: Path) -> Iterator[Server]:
    """A server of its own, whose memory and counters nobody else moves."""
    with serve(repository) as running, httpx.Client(base_url=running.address) as http:
        assert http.get("/readyz").status_code == 200
        yield running


def wait_until_nothing_is_computed(http: httpx.Client, begin: float = -1) -> float:
    """Return the tokens that were embedded once they are more than `begin`, and their number stands still."""
    last, deadline = -1.0, time.monotonic() + 20
    while (now := tokens_of(http, "gpt2-small")) != last or now <= begin:
        assert time.monotonic() < deadline
        last = now
        time.sleep(0.3)
    return last


@pytest.mark.parametrize("protocol", ["socket", "lines", "events"])
def test_nothing_is_computed_for_who_does_not_read_or_has_left(calm: Server, protocol: str) -> None:
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
            assert 1000 <= held_back - begin < 30_000  # of 60,000 that were asked for, 184 MB
            assert memory_of(calm) - memory < 64 * 2**20
        time.sleep(0.3)
        # What had been begun may end; what is in flight between the two is read by nobody.
        assert wait_until_nothing_is_computed(http) - held_back <= 2000


def test_a_grpc_stream_that_nobody_reads_is_held_back(calm: Server) -> None:
    request = service_pb2.ModelInferRequest(model_name="gpt2-small")
    request.inputs.add(name="input_ids", datatype="INT64", shape=[1, 1000])
    request.raw_input_contents.append(np.ones(1000, "<i8").tobytes())
    with httpx.Client(base_url=calm.address, timeout=20) as http:
        begin, memory = tokens_of(http, "gpt2-small"), memory_of(calm)
        with grpc.insecure_channel(calm.grpc) as channel:
            call = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            )(iter([request] * 60))
            held_back = wait_until_nothing_is_computed(http, begin)
            assert 1000 <= held_back - begin < 30_000
            assert memory_of(calm) - memory < 64 * 2**20
            call.cancel()
        assert wait_until_nothing_is_computed(http) - held_back <= 2000


@pytest.mark.parametrize("encoding", ["prompt_embeds", "base64", "float"])
def test_prompts_that_nobody_reads_take_no_memory(calm: Server, encoding: str) -> None:
    fields = {"input_ids": [[1] * 1024] * 64, "output": "token_embeddings", "encoding": encoding}
    with httpx.Client(base_url=calm.address, timeout=20) as http:
        memory = memory_of(calm)
        with http.stream("POST", "/models/gpt2-small/embed", json=fields) as answer:
            assert answer.status_code == 200
            next(answer.iter_raw())
            assert memory_of(calm) - memory < 64 * 2**20  # of 268 MB of text at least
        assert http.get("/readyz").status_code == 200
