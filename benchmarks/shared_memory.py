"""CPU time of the server and requests per second: shared memory beside loopback TCP, with the same tritonclient.

    python -m benchmarks.shared_memory [--rounds N] [--requests N]

Serves gpt2-small of `model_repository`. A client of HTTP and one of gRPC send (32, 512) ids, and take the vectors from
the message or from a region of shared memory. With an NVIDIA GPU they also leave ids and vectors in its memory. In
each round the ways take turns. First, their vectors are compared bit for bit. Prints the medians, and exits with 1 if a
ratio of CPU time is over the floor.
"""

import argparse
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import shared_memory

from benchmarks.streams import running
from preblock.service.runtime.providers import cuda_unavailable_reason
from tests.support.servers import free_port

MODEL, SHAPE, WIDTH = "gpt2-small", (32, 512), 768
MOST_CPU = 0.6
"""Largest CPU time of the server through shared memory, over TCP."""
TCP, SHARED, CUDA = "TCP", "shared memory", "memory of a GPU"
VECTOR_BYTES = 4 * SHAPE[0] * SHAPE[1] * WIDTH


class Sample(NamedTuple):
    """A round of one way: CPU seconds of the server for each request, and requests per second."""

    cpu: float
    rate: float


def main() -> None:
    """Serve, measure and print the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=20)
    options = parser.parse_args()
    preblock, grpc_port = Path(sys.executable).parent / "preblock", free_port()
    allowed = ("--grpc-port", grpc_port, "--max-shared-memory-bytes", 2**30)
    missed = False
    with running(preblock, "serve", "--port", 0, *allowed) as (pid, port):
        print(f"{SHAPE}, width {WIDTH}; {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
            pass
        for module, address in ((tritonclient.http, port), (tritonclient.grpc, grpc_port)):
            with module.InferenceServerClient(f"127.0.0.1:{address}") as client:
                found = measure(module, client, pid, options.rounds, options.requests)
            missed |= report(module.__name__, found)
    sys.exit(missed)


def measure(module: Any, client: Any, pid: int, rounds: int, requests: int) -> dict[str, list[Sample]]:
    """Return the samples of each way, after a comparison of their vectors."""
    ids = np.random.default_rng(0).integers(0, 50257, SHAPE)
    regions = [
        shared_memory.create_shared_memory_region(name, f"preblock-{os.getpid()}-{name}", size)
        for name, size in (("ids", ids.nbytes), ("vectors", VECTOR_BYTES))
    ]
    try:
        shared_memory.set_shared_memory_region(regions[0], [ids])
        for region, size in zip(regions, (ids.nbytes, VECTOR_BYTES), strict=True):
            name = region._triton_shm_name
            client.register_system_shared_memory(name, region._shm_key, size)
        ways: dict[str, Callable[[], object]] = {
            TCP: partial(infer, module, client, ids),
            SHARED: partial(infer_shared, module, client, ids.nbytes, regions[1]),
        }
        expected = infer(module, client, ids).tobytes()
        assert infer_shared(module, client, ids.nbytes, regions[1]).tobytes() == expected
        if cuda_unavailable_reason() is None:
            ways[CUDA] = open_gpu(module, client, ids, expected)
        found: dict[str, list[Sample]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(sample(way, pid, requests))
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
    finally:
        for region in regions:
            shared_memory.destroy_shared_memory_region(region)
    return found


def infer(module: Any, client: Any, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the vectors of a request over TCP, (32, 512, WIDTH)."""
    tensor = module.InferInput("input_ids", SHAPE, "INT64").set_data_from_numpy(ids)
    answer = client.infer(MODEL, [tensor], outputs=[module.InferRequestedOutput("embeddings")])
    vectors: NDArray[np.float32] = answer.as_numpy("embeddings")
    return vectors


def infer_shared(module: Any, client: Any, size: int, region: Any) -> NDArray[np.float32]:
    """Return the vectors of a request through shared memory, a view of the region.

    Args:
        module: of tritonclient, for HTTP or gRPC.
        client: of the module.
        size: bytes of the ids.
        region: receives the vectors.

    """
    infer_into(module, client, size)
    vectors: NDArray[np.float32] = shared_memory.get_contents_as_numpy(region, np.float32, (*SHAPE, WIDTH))
    return vectors


def infer_into(module: Any, client: Any, size: int, ids: str = "ids", vectors: str = "vectors") -> None:
    """Request vectors in the region `vectors` for ids of `size` bytes in the region `ids`."""
    tensor = module.InferInput("input_ids", SHAPE, "INT64").set_shared_memory(ids, size)
    output = module.InferRequestedOutput("embeddings")
    output.set_shared_memory(vectors, VECTOR_BYTES)
    client.infer(MODEL, [tensor], outputs=[output])


def open_gpu(module: Any, client: Any, ids: NDArray[np.int64], expected: bytes) -> Callable[[], object]:
    """Return the way through memory of a GPU, after a comparison of its vectors with `expected`."""
    from tritonclient.utils import cuda_shared_memory

    sizes = {"gpu-ids": ids.nbytes, "gpu-vectors": VECTOR_BYTES}
    regions = {name: cuda_shared_memory.create_shared_memory_region(name, size, 0) for name, size in sizes.items()}
    cuda_shared_memory.set_shared_memory_region(regions["gpu-ids"], [ids])
    for name, size in sizes.items():
        client.register_cuda_shared_memory(name, cuda_shared_memory.get_raw_handle(regions[name]), 0, size)
    way = partial(infer_into, module, client, ids.nbytes, *sizes)
    way()
    found = cuda_shared_memory.get_contents_as_numpy(regions["gpu-vectors"], np.float32, (*SHAPE, WIDTH))
    assert found.tobytes() == expected
    return way


def sample(way: Callable[[], object], pid: int, requests: int) -> Sample:
    """Measure one way."""
    cpu, began = cpu_seconds(pid), time.perf_counter()
    for _ in range(requests):
        way()
    return Sample((cpu_seconds(pid) - cpu) / requests, requests / (time.perf_counter() - began))


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, with the resolution of the scheduler."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def report(protocol: str, found: dict[str, list[Sample]]) -> bool:
    """Print the medians and their ratio, and return whether the floor is missed."""
    tcp, shared = found[TCP], found[SHARED]
    ratios = [one.cpu / other.cpu for one, other in zip(shared, tcp, strict=True)]
    ratio = statistics.median(ratios)
    for name, samples in found.items():
        cpu, rate = (statistics.median(values) for values in zip(*samples, strict=True))
        print(f"{protocol}, {name}: {1e3 * cpu:.1f} ms of CPU time per request, {rate:.1f} requests/s")
    verdict = "missed" if ratio > MOST_CPU else "held"
    print(f"  CPU time {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {verdict}: at most {MOST_CPU}")
    return ratio > MOST_CPU


if __name__ == "__main__":
    main()
