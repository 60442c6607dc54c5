"""A run with vectors in host memory: as the service does it, and into memory allocated before.

Ways: `kernel` and `session` as the service calls them, the first for sums of rows; `pageable` and `pinned` bind the
session's output to reused memory; `device` leaves the vectors on the GPU.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cuda.models import FRONT_ENDS, open_kernel
from benchmarks.streams import WIDTH
from benchmarks.tensors import SHAPES
from preblock.service.runtime.providers import CUDA, cuda_unavailable_reason
from preblock.service.runtime.session import open_session

ROUNDS, SECONDS = 5, 0.04
Way = Callable[[], object]


def main(work: Path, artifacts: Path, minutes: float) -> dict[str, Any]:
    """Return the median microseconds of a run by model, shape and way."""
    del artifacts, minutes
    assert cuda_unavailable_reason() is None
    found: dict[str, Any] = {}
    for model in FRONT_ENDS:
        for shape in SHAPES:
            found[f"{model} {shape}"] = measure(work / "repository" / model / "1", shape)
            print(model, shape, found[f"{model} {shape}"], flush=True)
    return found


def measure(artifact: Path, shape: tuple[int, int]) -> dict[str, float]:
    """Time the ways in turns, after a comparison of their bits."""
    session = open_session(artifact, CUDA)
    lookup = open_kernel(artifact)
    ids = np.random.default_rng(0).integers(0, 30522, shape)
    feeds = {tensor.name: ids if tensor.name == "input_ids" else ids * 0 for tensor in session.inputs}
    feeds |= {"offset": np.zeros(1, np.int64)}
    pageable, pinned = torch.empty((*shape, WIDTH)), torch.empty((*shape, WIDTH), pin_memory=True)
    ways: dict[str, Way] = {
        **({"kernel": lambda: lookup.run(feeds, ["embeddings"])} if lookup else {}),
        "session": lambda: session.run(feeds, ["embeddings"]),
        "pageable": bound(session._session, feeds, "cpu", pageable),
        "pinned": bound(session._session, feeds, "cpu", pinned),
        "device": bound(session._session, feeds, "cuda", torch.empty((*shape, WIDTH), device="cuda")),
    }
    expected = session.run(feeds, ["embeddings"])["embeddings"].tobytes()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            end = time.perf_counter() + SECONDS
            while time.perf_counter() < end:
                began = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - began)
    if lookup:
        assert lookup.run(feeds, ["embeddings"])["embeddings"].tobytes() == expected
    assert pageable.numpy().tobytes() == pinned.numpy().tobytes() == expected
    return {name: round(1e6 * statistics.median(values), 1) for name, values in times.items()}


def bound(session: Any, feeds: dict[str, Any], device: str, out: torch.Tensor) -> Way:
    """Return a function to run the graph with its output bound to `out`."""

    def run() -> None:
        binding = session.io_binding()
        for node in session.get_inputs():
            binding.bind_cpu_input(node.name, feeds[node.name])
        binding.bind_output("embeddings", device, 0, np.float32, tuple(out.shape), out.data_ptr())
        session.run_with_iobinding(binding)

    return run
