"""From request bytes to response bytes over loopback: servers on the CPU and on CUDA, in turns, by model and shape."""

import http.client
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cuda.models import FRONT_ENDS
from benchmarks.servers import PREBLOCK
from benchmarks.streams import running
from benchmarks.tensors import SHAPES, native

PROVIDERS = ("cpu", "cuda")
ROUNDS, SECONDS = 5, 0.15
"""Seconds of one provider in a round; at least three requests."""


def main(work: Path, artifacts: Path, minutes: float) -> dict[str, Any]:
    """Return the median milliseconds of a request by model, shape and provider."""
    del artifacts, minutes
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        clients = {provider: stack.enter_context(serving(work / "repository", provider)) for provider in PROVIDERS}
        for model in FRONT_ENDS:
            for shape in SHAPES:
                found[f"{model} {shape}"] = compare(clients, model, shape)
                print(model, shape, found[f"{model} {shape}"], flush=True)
    return found


@contextmanager
def serving(repository: Path, provider: str) -> Iterator[http.client.HTTPConnection]:
    """Serve the models on a provider, and yield a connection."""
    with running(PREBLOCK, "serve", "--port", 0, "--repository", repository, "--provider", provider) as (_, port):
        yield http.client.HTTPConnection("127.0.0.1", port, timeout=60)


def compare(clients: dict[str, http.client.HTTPConnection], model: str, shape: tuple[int, int]) -> dict[str, float]:
    """Return the median milliseconds of a request by provider, and the largest difference of their vectors."""
    message = native(np.random.default_rng(0).integers(0, 30522, shape))
    path = f"/models/{model}/embed"
    ways = {
        provider: partial(send, client, path, message.body, message.headers) for provider, client in clients.items()
    }
    vectors = {provider: np.frombuffer(way()[128:], np.float32) for provider, way in ways.items()}
    times: dict[str, list[float]] = {provider: [] for provider in ways}
    for _ in range(ROUNDS):
        for provider, way in ways.items():
            end, count = time.perf_counter() + SECONDS, 0
            while time.perf_counter() < end or count < 3:
                began = time.perf_counter()
                way()
                times[provider].append(time.perf_counter() - began)
                count += 1
    found = {provider: round(1e3 * statistics.median(values), 3) for provider, values in times.items()}
    return found | {"difference": float(np.abs(vectors["cpu"] - vectors["cuda"]).max())}


def send(client: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Return the body of the response."""
    client.request("POST", path, body, headers)
    response = client.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(content.decode())
    return content
