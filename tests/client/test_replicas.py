"""Clients of several servers with the same models."""

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from preblock.client.errors import RequestError
from tests.client.conftest import Connect, raises_kind
from tests.client.flaky_proxy import STALL, FlakyProxy, canned
from tests.support.servers import Server, free_port, serve_replicas

BUSY = canned("503 Service Unavailable", b"", "Retry-After: 0")
SEED = 0
"""Both clients of a test draw the same place, so one of two orders begins with the failing server."""


@pytest.fixture
def replicas(tiny_repository: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start three servers; a test may kill them."""
    with serve_replicas(tiny_repository, 3) as started:
        yield started


def serves_a_stream(address: str) -> bool:
    return "\npreblock_streams_open 1" in httpx.get(f"{address}/metrics", timeout=60).text


@pytest.mark.parametrize("order", [1, -1])
def test_call_switches_server_when_one_is_down(connect: Connect, tiny_server: Server, order: int) -> None:
    random.seed(SEED)
    dead = f"http://127.0.0.1:{free_port()}"
    client = connect([dead, tiny_server.address][::order], retries=1)
    expected = connect(tiny_server.address).embed([1, 2], model="gpt").vectors
    for _ in range(3):  # it stays with the server that answers
        assert np.array_equal(client.embed([1, 2], model="gpt").vectors, expected)
    with client.decode("gpt", resume=True) as stream:
        assert np.array_equal(stream.step([1, 2]), expected)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "act", [BUSY, canned("429 Too Many Requests"), canned("502 Bad Gateway")], ids=["503", "429", "502"]
)
def test_call_switches_server_when_one_is_busy(
    connect: Connect, tiny_server: Server, flaky: FlakyProxy, act: bytes, order: int
) -> None:
    random.seed(SEED)
    flaky.script = [act] * 9
    client = connect([flaky.address, tiny_server.address][::order], retries=1)
    for _ in range(3):
        assert client.embed([1, 2], model="gpt").vectors.shape == (1, 2, 4)
    assert flaky.connections <= 1


def test_call_with_long_retry_after_is_not_retried(connect: Connect, flaky: FlakyProxy) -> None:
    flaky.script = [canned("503 Service Unavailable", b"", "Retry-After: 31")] * 2
    with raises_kind("Unavailable"):
        connect([flaky.address, flaky.address], retries=3).embed([1], model="gpt")
    assert flaky.connections == 1


def test_response_timeout_is_not_retried(connect: Connect, flaky: FlakyProxy) -> None:
    flaky.script = [STALL]
    with raises_kind("TimedOut"):
        connect([flaky.address, flaky.address], timeout=0.5).embed([1], model="gpt")
    assert flaky.connections == 1


def test_stream_resumes_on_other_server_at_its_offset(
    connect: Connect, replicas: dict[str, subprocess.Popen[str]]
) -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    client = connect([*replicas], retries=3)
    whole = client.embed(tokens, model="gpt").vectors
    with client.decode("gpt", resume=True) as stream:
        for place, token in enumerate(tokens):
            assert np.array_equal(stream.step([token]), whole[:, place : place + 1])
            if len(replicas) > 1:
                (used,) = filter(serves_a_stream, replicas)
                process = replicas.pop(used)
                process.kill()
                process.wait()
    assert len(replicas) == 1
    assert np.array_equal(client.embed(tokens, model="gpt").vectors, whole)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "url: got no address, expected one address or more"),
        (["http://a", "https://b"], "url: got addresses with http:// and with https://, expected one of both for all"),
        (["http+unix://%2Fa", "http://b"], "url: got several addresses, one with http\\+unix://, expected one address"),
        (["http+unix://a"], "url: got http\\+unix://a, expected an absolute path with %2F for each /"),
        (["http://a", "b"], "url: got b, expected http://… or https://…"),
    ],
)
def test_connect_rejects_unusable_addresses(connect: Connect, urls: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        connect(urls)
