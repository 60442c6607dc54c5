"""A run at (32, 512, 768) on the GPU: inputs and outputs stay there, 100 runs back to back, timed by CUDA events.

Ways: Preblock's kernel, for sums of rows; the graph in onnxruntime; one device copy of as many bytes; the same module
in PyTorch, and a fused kernel by torch.compile. A profile names the kernels of each.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from benchmarks.cuda.models import FRONT_ENDS, open_kernel
from benchmarks.streams import WIDTH
from preblock.service.runtime.providers import CUDA, cuda_unavailable_reason
from preblock.service.runtime.session import CUDA_OPTIONS

SHAPE = (32, 512)
RUNS, ROUNDS = 100, 9
KERNEL = "kernel of Preblock"
ASYNCHRONOUS = "disable_synchronize_execution_providers"
VALUES = SHAPE[0] * SHAPE[1] * WIDTH


def main(work: Path, artifacts: Path, minutes: float) -> dict[str, Any]:
    """Return milliseconds per run, and kernels, of each model."""
    del artifacts, minutes
    assert cuda_unavailable_reason() is None
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "onnxruntime": ort.__version__}
    with torch.cuda.stream(stream), torch.inference_mode():
        for name in FRONT_ENDS:
            found[name] = measure(name, work / "repository" / name / "1", stream)
            print(name, found[name], flush=True)
    return found


def measure(name: str, artifact: Path, stream: torch.cuda.Stream) -> dict[str, Any]:
    """Measure one model; first its vectors are compared with those of PyTorch."""
    module = load(name, artifact)
    out, copy = torch.empty((*SHAPE, WIDTH), device="cuda"), torch.empty((*SHAPE, WIDTH), device="cuda")
    ids = torch.randint(0, module.config.tokens.rows, SHAPE, device="cuda")
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    given = {"input_ids": ids, "offset": offset} | dict.fromkeys(module.config.indices, ids * 0)
    run = bound(artifact, given, out, stream)
    expected = module(**given)
    run()
    stream.synchronize()
    difference = float((out - expected).abs().max())
    compiled: Any = torch.compile(module)
    fused = compiled(**given)
    kernel = fused_kernel(artifact, given, out)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: copy.copy_(out),
        **({KERNEL: kernel} if kernel else {}),
        "onnxruntime": run,
        "torch": lambda: module(**given),
        "torch.compile": lambda: compiled(**given),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, call in ways.items():
            with torch.cuda.stream(torch.cuda.default_stream() if way == KERNEL else stream):
                times[way].append(timed(call))
    if kernel:
        kernel()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    return {
        "milliseconds": {way: round(statistics.median(values), 4) for way, values in times.items()},
        "difference": difference,
        "difference of torch.compile": float((fused - expected).abs().max()),
        "kernels": {way: kernels(call) for way, call in ways.items()},
    }


def load(name: str, artifact: Path) -> Any:
    """Return the module of an artifact on the GPU, with the artifact's weights."""
    from preblock.export.stored_tables import read_data
    from preblock.models import FrontEnd

    data, _ = read_data(artifact, FRONT_ENDS[name]().config)
    return FrontEnd.from_data(data).eval().cuda()


def fused_kernel(artifact: Path, given: dict[str, torch.Tensor], out: torch.Tensor) -> Callable[[], object] | None:
    """Return a function to start Preblock's kernel into `out` on the default stream; None for other front-ends."""
    lookup = open_kernel(artifact)
    if lookup is None:
        return None
    ids, offset = given["input_ids"], given["offset"]
    return lambda: lookup.launch(ids.data_ptr(), tuple(ids.shape), offset.data_ptr(), 1, out.data_ptr())


def bound(
    artifact: Path, given: dict[str, torch.Tensor], out: torch.Tensor, stream: torch.cuda.Stream
) -> Callable[[], object]:
    """Return a function to start a run of the graph into `out` on the stream, without waiting for it."""
    options = CUDA_OPTIONS | {"user_compute_stream": str(stream.cuda_stream)}
    session = ort.InferenceSession(artifact / "model.onnx", providers=[(CUDA, options)])
    binding, run_options = session.io_binding(), ort.RunOptions()
    run_options.add_run_config_entry(ASYNCHRONOUS, "1")
    for node in session.get_inputs():
        tensor = given[node.name]
        binding.bind_input(node.name, "cuda", 0, np.int64, tuple(tensor.shape), tensor.data_ptr())
    binding.bind_output("embeddings", "cuda", 0, np.float32, tuple(out.shape), out.data_ptr())
    return lambda: session.run_with_iobinding(binding, run_options)


def timed(call: Callable[[], object]) -> float:
    """Return milliseconds of a run, the mean of 100 back to back."""
    event: Any = torch.cuda.Event
    began, ended = event(enable_timing=True), event(enable_timing=True)
    for _ in range(10):
        call()
    began.record()
    for _ in range(RUNS):
        call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / RUNS


def kernels(call: Callable[[], object]) -> dict[str, float]:
    """Return the microseconds of each kernel of a run, the mean of 10."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    found = profile.key_averages()
    return {event.key[:90]: round(event.self_device_time_total / 10, 2) for event in found if event.count >= 10}
