"""onnxruntime sessions. Only this module and `providers` import onnxruntime."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import Tensor
from preblock.service.artifacts.names import DATA, GRAPH
from preblock.service.core.errors import ArtifactError, Forbidden, ProviderError
from preblock.service.core.system import return_free_memory
from preblock.service.runtime.buffer_pool import MAX_BYTES
from preblock.service.runtime.cuda_driver import DriverError, load_driver
from preblock.service.runtime.cuda_memory import SESSION_GPU, check_memory_limit, pinned_pool
from preblock.service.runtime.providers import CPU, CUDA
from preblock.service.runtime.runner import Feeds, Float32

LOG = logging.getLogger(__name__)

INLINE_MAX_VALUES = 3 * 2**17
"""Values of an array, or bytes of a copy: a few tenths of a millisecond of work."""

MIN_KEPT_VALUES = 2**16
"""Values of the smallest output whose memory the arena of onnxruntime should give back."""
_GROWN: "WeakSet[Session]" = WeakSet()
"""Sessions with a large run since the last `free_memory`."""

# The kernel of this fusion sums in scalars, by E[x^2] - mean^2: several times slower and less exact than the parts.
SLOW_ON_CPU = ["SkipLayerNormFusion"]
# The defaults: float32 products in 10 bits, and memory in powers of two.
CUDA_OPTIONS = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}


def _check_readable(folder: Path, graph: str) -> None:
    """Raise ArtifactError if onnxruntime cannot read the files of a graph."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:  # onnxruntime takes no other path
        raise ArtifactError(graph, f"the path {str(folder)!a}", "a path in UTF-8") from error
    for file in (graph, DATA):
        if not (folder / file).is_file():
            raise ArtifactError(file, "no such file", "a file of the artifact", message=f"{file} is missing")


def _session_options(threads: int) -> ort.SessionOptions:
    """Return the options of a session with `threads` in one call."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # A spinning thread keeps a core busy between requests.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


class Session:
    """One graph in onnxruntime.

    Args:
        folder: the artifact; weights are mapped from the data file, not copied.
        provider: onnxruntime name of the provider.
        threads: of one call; default 1.
        graph: file name in the artifact; default model.onnx.
        gpu_mem_limit_bytes: GPU memory limit, tables included; default None: no limit.
        content: ONNX to run in place of the file `graph`, with tables in the same data file, by its name without
            links; default None.

    Raises:
        ArtifactError: onnxruntime cannot load the graph; the log says why.
        ProviderError: the graph would run on another provider than requested.

    """

    def __init__(
        self,
        folder: Path,
        provider: str = CPU,
        threads: int = 1,
        graph: str = GRAPH,
        gpu_mem_limit_bytes: int | None = None,
        content: bytes | None = None,
    ) -> None:
        _check_readable(folder, graph)
        options = _session_options(threads)
        if content is not None:
            place = (folder / DATA).resolve().parent
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(place))
        providers: list[Any] = [provider]
        if provider != CPU:
            # onnxruntime does not count tables, and ignores a limit below their size.
            check_memory_limit((folder / DATA).stat().st_size, gpu_mem_limit_bytes)
            limit = {} if gpu_mem_limit_bytes is None else {"gpu_mem_limit": str(gpu_mem_limit_bytes)}
            stream = {"user_compute_stream": str(self._take_stream(graph))}
            providers = [(provider, CUDA_OPTIONS | limit | stream), CPU]
        try:
            self._session = ort.InferenceSession(
                folder / graph if content is None else content,
                options,
                providers=providers,
                disabled_optimizers=SLOW_ON_CPU if provider == CPU else None,
            )
        except Exception as error:  # onnxruntime's exceptions share no narrower parent
            # The text names paths, and the error may reach a client.
            LOG.warning("%s cannot be loaded: %s", graph, error)
            message = f"{graph} cannot be loaded; see the log"
            raise ArtifactError(graph, "an invalid graph", "a valid graph", message=message) from error
        self.provider: str = self._session.get_providers()[0]
        if self.provider != provider:
            message = f"onnxruntime could not start {provider} and took {self.provider}"
            raise ProviderError("provider", self.provider, provider, message=message)
        self.inputs = tuple(_describe(node) for node in self._session.get_inputs())
        self.outputs = tuple(_describe(node) for node in self._session.get_outputs())
        self._inputs = [tensor.name for tensor in self.inputs]
        self._outputs = [tensor.name for tensor in self.outputs]
        self._narrow = any(tensor.dtype == "float16" for tensor in self.outputs)
        self._smallest: Feeds | None = None
        self._grown = False

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, Float32]:
        """Return the named outputs, or all, for validated `feeds`: the graph itself wraps negative indices.

        Feeds without an input are ignored, so that several graphs can run on the same feeds. Float16 is widened.
        """
        names = self._outputs if outputs is None else outputs
        # Another dictionary or zip adds a microsecond; a call of one token takes only five.
        given = feeds if len(feeds) == len(self._inputs) else {name: feeds[name] for name in self._inputs}
        found = self._session.run(names, given)
        if not self._grown and found[0].size >= MIN_KEPT_VALUES:
            self._grown = True
            _GROWN.add(self)
        found = _widen(found) if self._narrow else found
        return {names[0]: found[0]} if len(names) == 1 else dict(zip(names, found, strict=True))

    def warm_up(self, feeds: Feeds) -> None:
        """Run once, because the first run is slow."""
        self.run(feeds)
        self._smallest = feeds

    def shrink(self) -> None:
        """Return the free memory of the arena: it holds every run and every output, and never shrinks otherwise."""
        self._grown = False
        if self._smallest is not None:
            options = ort.RunOptions()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
            self._session.run(self._outputs, dict(self._smallest), options)

    def refusal(self, feeds: Feeds) -> str | None:
        """Run once, and return the error of onnxruntime, or None. The CPU rejects an index beyond the table."""
        options = ort.RunOptions()
        options.log_severity_level = 4  # the caller reports the error
        try:
            self._session.run(None, dict(feeds), options)
        except Exception as error:  # onnxruntime's exceptions share no narrower parent
            return " ".join(str(error).split())
        return None

    def _take_stream(self, graph: str) -> int:
        """Return a stream of the GPU; raise ProviderError without a driver, and ArtifactError if the driver fails."""
        try:
            return load_driver().take_stream(SESSION_GPU, self)
        except Forbidden as error:
            message = f"{CUDA} cannot be used: {error.got}"
            raise ProviderError("provider", CUDA, CPU, message=message) from error
        except DriverError as error:
            message = f"{graph} cannot be loaded into the GPU: {error.strerror}"
            raise ArtifactError(graph, error.strerror, "a GPU with free memory", message=message) from error


class CudaSession(Session):
    """A session on an NVIDIA GPU; see `Session` for the arguments.

    A session has one stream, and computes one call at a time. Without a given stream, onnxruntime keeps one for each
    thread that has run a graph, with workspaces of cuBLAS and cuDNN in GPU memory
    (https://github.com/microsoft/onnxruntime/issues/29351).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._device = "cuda" if self.provider == CUDA else "cpu"  # without a GPU, in tests
        self._lock = Lock()

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, Float32]:
        """Return the named outputs, or all, for validated `feeds`; each is copied from the GPU once."""
        names = self._outputs if outputs is None else outputs
        computed = self._compute(feeds, names)
        found = [copy_to_host(values) if self._device == "cuda" else values.numpy() for values in computed]
        return dict(zip(names, _widen(found) if self._narrow else found, strict=True))

    @contextmanager
    def run_on_gpu(self, feeds: Feeds, output: str) -> Iterator[tuple[int, int]]:
        """Compute an output for a block: yield address and size in bytes of its values on the GPU."""
        (values,) = self._compute(feeds, (output,))
        yield values.data_ptr(), values.tensor_size_in_bytes()
        del values  # the memory is the block's until here

    def _compute(self, feeds: Feeds, outputs: Sequence[str]) -> list[ort.OrtValue]:
        """Run the graph after earlier calls, and return the named outputs on the GPU."""
        with self._lock:
            return self._run_bound(feeds, outputs)

    def _run_bound(self, feeds: Feeds, outputs: Sequence[str]) -> list[ort.OrtValue]:
        """Run the graph. The copy of the inputs, the run, and the end of the binding use the stream."""
        binding = self._session.io_binding()
        for name in self._inputs:
            binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name]))
        for name in outputs:
            binding.bind_output(name, self._device)
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return list(binding.get_outputs())

    def is_float32(self, output: str) -> bool:
        """Return whether the graph computes an output in float32."""
        return any(tensor.name == output and tensor.dtype == "float32" for tensor in self.outputs)

    def warm_up(self, feeds: Feeds) -> None:
        """Run for one token and for micro-batches of several sizes, so that their memory is allocated now."""
        super().warm_up(feeds)
        if "input_ids" not in self._inputs:
            return
        width = self.outputs[0].shape[-1]
        most = INLINE_MAX_VALUES // width if isinstance(width, int) else 1
        for tokens in filter(None, (most >> fewer for fewer in (9, 6, 3, 0))):
            shapes = {1: (tokens,), 2: (tokens, 1)}
            self.run({tensor.name: np.zeros(shapes[len(tensor.shape)], np.int64) for tensor in self.inputs})


def free_memory() -> None:
    """Return the free memory of onnxruntime and of the allocator to the system."""
    while _GROWN:
        _GROWN.pop().shrink()
    return_free_memory()


def open_session(
    folder: Path, provider: str, threads: int = 1, graph: str = GRAPH, gpu_mem_limit_bytes: int | None = None
) -> Session:
    """Open a graph of the artifact in `folder` on `provider`; raises as `Session`."""
    kind = Session if provider == CPU else CudaSession
    return kind(folder, provider, threads, graph, gpu_mem_limit_bytes)


def copy_to_host(values: ort.OrtValue) -> NDArray[Any]:
    """Return values of a GPU; float32 in page-locked memory, used again, up to the size of a pooled buffer."""
    size = values.tensor_size_in_bytes()
    if values.data_type() == "tensor(float)" and 0 < size <= MAX_BYTES:
        with suppress(DriverError, MemoryError):  # onnxruntime copies into pageable memory
            vectors = pinned_pool().take(tuple(values.shape()))
            load_driver().copy_to_host(SESSION_GPU, vectors.ctypes.data, values.data_ptr(), size)
            return vectors
    found: NDArray[Any] = values.numpy()
    return found


def _widen(outputs: Sequence[NDArray[Any]]) -> list[Float32]:
    return [output.astype(np.float32, copy=False) for output in outputs]


def _describe(node: Any) -> Tensor:
    names = {"tensor(int64)": "int64", "tensor(float)": "float32", "tensor(float16)": "float16"}
    dtype = names.get(node.type, node.type)
    return Tensor.model_construct(name=node.name, dtype=dtype, shape=tuple(node.shape))
