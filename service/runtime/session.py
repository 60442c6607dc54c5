"""onnxruntime: providers and sessions. Nowhere else in the service is it imported."""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import DATA, GRAPH, Tensor
from preblock.service.core.errors import ArtifactError, ProviderError
from preblock.service.runtime.cuda_memory import Bytes, pinned_by_cuda
from preblock.service.runtime.io_binding import Bound

# onnxruntime reports its use to its maker unless it is told not to, before it is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as pybind

Float32 = NDArray[np.float32]
LOG = logging.getLogger(__name__)

VERSION: str = ort.__version__
INLINE_MAX_VALUES = 3 * 2**17
"""Values of an array, and bytes that are only copied, that are handled in a few tenths of a millisecond."""
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

# The fused kernel is a scalar sum with E[x^2] - mean^2: several times slower and less exact than the parts.
SLOW_ON_CPU = ["SkipLayerNormFusion"]
HOST = pybind.OrtDevice(pybind.OrtDevice.cpu(), pybind.OrtDevice.default_memory(), 0)
# By default products of float32 are those of numbers with 10 bits; and memory would grow by powers of two.
ON_CUDA = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}


PROBE = (
    b'\x08\n:9\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x14"
)
"""The smallest ONNX model: y = x + x, float32 (1,)."""


def why_no_cuda() -> str | None:
    """Return why CUDA cannot be used, or None where a session ran on it.

    onnxruntime itself falls back to the CPU without an exception.
    """
    if CUDA not in ort.get_available_providers():
        return "this onnxruntime has no CUDA: install preblock[gpu] in place of preblock[cpu]"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: libcuda.so.1 was not found"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver finds no GPU"
    # The libraries of CUDA and cuDNN that pip installed lie where the loader does not look.
    ort.preload_dlls()
    probe = ort.InferenceSession(PROBE, providers=[CUDA, CPU])
    if probe.get_providers()[0] != CUDA:
        return "onnxruntime could not start it, and wrote on standard error why"
    probe.run(None, {"x": np.ones(1, np.float32)})
    return None


class Choice(NamedTuple):
    """Where models run, and why.

    Args:
        requested: auto, cpu or cuda.
        active: onnxruntime name of the provider that sessions are opened with.
        probed: that of the provider on which a session ran that was opened to try CUDA; None where none was tried.
        reason: why CUDA is not used where it was tried.

    """

    requested: str
    active: str
    probed: str | None
    reason: str | None


def choose(requested: Literal["auto", "cpu", "cuda"]) -> Choice:
    """Return where to run.

    Raises:
        ProviderError: CUDA was requested and cannot be used; the error says why.

    """
    if requested == "cpu":
        return Choice(requested, CPU, None, None)
    reason = why_no_cuda()
    if reason is None:
        return Choice(requested, CUDA, CUDA, None)
    if requested == "cuda":
        raise ProviderError("provider", "cuda", f"auto or cpu, since {reason}")
    return Choice(requested, CPU, None, reason)


def choose_provider(requested: Literal["auto", "cpu", "cuda"]) -> str:
    """Return the onnxruntime name of the provider to run on; raises as `choose`."""
    return choose(requested).active


class Session:
    """One graph, ready to run.

    Args:
        folder: the artifact; its weights are mapped from the data file, not copied.
        provider: onnxruntime name, as `choose_provider` returns it.
        threads: threads of one call; default 1.
        graph: which graph of the artifact; default model.onnx.
        gpu_mem_limit_bytes: most memory of a GPU that it takes, its tables included; default None: all that there is.
        memory: returns as many bytes, uint8 (N,), for the inputs and outputs of calls; default None: on the CPU each
            call has its own, and CUDA what it reads and writes itself.

    Raises:
        ArtifactError: onnxruntime cannot load the graph; why is logged.
        ProviderError: the graph would run on another provider than asked for.

    """

    def __init__(
        self,
        folder: Path,
        provider: str = CPU,
        threads: int = 1,
        graph: str = GRAPH,
        gpu_mem_limit_bytes: int | None = None,
        memory: Callable[[int], Bytes] | None = None,
    ) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads that spin keep a core busy between requests.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        for file in (graph, DATA):
            if not (folder / file).is_file():
                raise ArtifactError(file, "no such file", "a file of the artifact")
        limit = {}
        if gpu_mem_limit_bytes is not None and provider != CPU:
            # onnxruntime holds tables to no limit, and nothing to one that is below them.
            if (size := (folder / DATA).stat().st_size) > gpu_mem_limit_bytes:
                raise ArtifactError(
                    DATA, f"{size} bytes", f"at most {gpu_mem_limit_bytes}, which is gpu_mem_limit_bytes"
                )
            limit["gpu_mem_limit"] = str(gpu_mem_limit_bytes)
        try:
            self._session = ort.InferenceSession(
                folder / graph,
                options,
                providers=[provider] if provider == CPU else [(provider, ON_CUDA | limit), CPU],
                disabled_optimizers=SLOW_ON_CPU if provider == CPU else None,
            )
        except Exception as error:  # onnxruntime's own exceptions share no narrower parent
            # Its text names paths, and may reach whoever asked for the model.
            LOG.warning("%s cannot be loaded: %s", graph, error)
            raise ArtifactError(graph, "what cannot be loaded; the log says why", "a graph that can be run") from error
        self.provider: str = self._session.get_providers()[0]
        if self.provider != provider:
            raise ProviderError("provider", self.provider, f"{provider}, which onnxruntime could not start")
        self.inputs = tuple(_describe(node) for node in self._session.get_inputs())
        self.outputs = tuple(_describe(node) for node in self._session.get_outputs())
        self._inputs = [tensor.name for tensor in self.inputs]
        self._outputs = [tensor.name for tensor in self.outputs]
        self._singles: dict[str, _Single] = {}
        if memory is None and provider == CUDA:
            memory = pinned_by_cuda
        self._bound = None if memory is None else Bound(self._run_into, self.inputs, self.outputs, memory)

    @property
    def bound(self) -> bool:
        """Whether calls have memory that stays, as on a GPU: then the next may run while one is sent."""
        return self._bound is not None

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> dict[str, Float32]:
        """Return the outputs that are named, or all, for `feeds` that were validated: the graph itself wraps negatives.

        Others among the feeds are left alone, so that several graphs can run on the same.
        """
        names = self._outputs if outputs is None else outputs
        if self._bound is not None and (bound := self._bound.run(feeds, names)) is not None:
            return bound
        # A call of one token takes five microseconds: a zip, or a dictionary made again, would be one more.
        given = feeds if len(feeds) == len(self._inputs) else {name: feeds[name] for name in self._inputs}
        found = self._session.run(names, given)
        return {names[0]: found[0]} if len(names) == 1 else dict(zip(names, found, strict=True))

    def run_single(self, feeds: Mapping[str, NDArray[Any]], output: str) -> Float32:
        """Return one output, as `run` does, for feeds of one token; sooner on the CPU."""
        single = self._singles.get(output)
        if single is not None and (found := single.run(feeds)) is not None:
            return found
        found = self.run(feeds, (output,))[output]
        if single is None and self._bound is None:
            values = np.zeros_like(found)
            self._singles[output] = _Single(self.prepare(feeds, {output: values}), values)
        return found

    def prepare(
        self, feeds: Mapping[str, NDArray[Any]], outputs: Mapping[str, Float32], taken: str | None = None
    ) -> "Prepared":
        """Return what runs calls that are shaped like `feeds`; see `Prepared`."""
        return Prepared(self._session, {name: feeds[name] for name in self._inputs}, outputs, taken)

    def _run_into(self, feeds: Mapping[str, NDArray[Any]], outputs: Mapping[str, Float32]) -> None:
        """Write outputs where they are to be.

        An IOBinding would copy inputs to a GPU while they are bound, and let others run before they are there.
        """
        given, found = pybind.OrtValueVector(), pybind.OrtValueVector()
        for vector, arrays in ((given, feeds), (found, outputs)):
            for array in arrays.values():
                vector.push_back(pybind.OrtValue.ortvalue_from_numpy(array, HOST))
        devices = [HOST] * len(outputs)
        self._session.run_with_ortvaluevector(ort.RunOptions(), [*feeds], given, [*outputs], found, devices)

    def warm(self, feeds: Mapping[str, NDArray[Any]]) -> None:
        """Run once, and one of tokens on a GPU for more: it takes memory for as many as run together, and keeps it."""
        self.run(feeds)
        if self._bound is not None and "input_ids" in self._inputs:
            width = self.outputs[0].shape[-1]
            most = INLINE_MAX_VALUES // width if isinstance(width, int) else 1
            for tokens in filter(None, (most >> fewer for fewer in (9, 6, 3, 0))):
                shapes = {1: (tokens,), 2: (tokens, 1)}
                self.run({tensor.name: np.zeros(shapes[len(tensor.shape)], np.int64) for tensor in self.inputs})

    def refusal(self, feeds: Mapping[str, NDArray[Any]]) -> str | None:
        """Run once, and return why onnxruntime cannot, or None: on the CPU it refuses an index that no table has."""
        options = ort.RunOptions()
        options.log_severity_level = 4  # what is returned need not be logged
        try:
            self._session.run(None, dict(feeds), options)
        except Exception as error:  # as above
            return " ".join(str(error).split())
        return None


class Prepared:
    """Calls of one shape on the CPU, whose inputs and outputs stay bound: making them anew takes half as long again.

    Args:
        session: runs them.
        feeds: one of them, by the inputs of the session; inputs are copied when it is run.
        outputs: where they are written.
        taken: an input that is read where it lies, as long as this lives; default none.

    """

    def __init__(
        self,
        session: ort.InferenceSession,
        feeds: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, Float32],
        taken: str | None = None,
    ) -> None:
        self._session, self._binding, self._taken = session, session.io_binding(), taken
        self._inputs = [(name, np.array(values, order="C")) for name, values in feeds.items() if name != taken]
        for name, values in self._inputs:
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(values))
        if taken is not None:
            self.take(feeds[taken])
        for name, values in outputs.items():
            self._binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(values))

    def take(self, values: NDArray[Any]) -> None:
        """Read other values, contiguous and of the same shape, where they lie."""
        self._binding.bind_ortvalue_input(self._taken, ort.OrtValue.ortvalue_from_numpy(values))

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> None:
        """Write the outputs for `feeds`; in one thread at a time."""
        for name, values in self._inputs:
            values[...] = feeds[name]
        self._session.run_with_iobinding(self._binding)


class _Single:
    """Calls of one token.

    Args:
        call: writes the output.
        output: the one that is wanted.

    """

    def __init__(self, call: Prepared, output: Float32) -> None:
        self._call, self._output = call, output
        self._taken = threading.Lock()

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> Float32 | None:
        """Return the output for `feeds`, or None while another thread is here."""
        if not self._taken.acquire(blocking=False):
            return None
        try:
            self._call.run(feeds)
            return self._output.copy()
        finally:
            self._taken.release()


def _describe(node: Any) -> Tensor:
    dtype = {"tensor(int64)": "int64", "tensor(float)": "float32"}.get(node.type, node.type)
    return Tensor.model_construct(name=node.name, dtype=dtype, shape=tuple(node.shape))
