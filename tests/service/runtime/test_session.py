"""onnxruntime: the provider in use, and the errors of a missing one. Oracle: a run on the CPU."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.io import read_with_identity
from preblock.service.artifacts.names import DATA, GRAPH
from preblock.service.core.errors import ArtifactError, Forbidden, ProviderError
from preblock.service.runtime.cuda_driver import has_driver, load_driver
from preblock.service.runtime.providers import (
    CPU,
    CUDA,
    PROBE,
    ProviderChoice,
    choose_provider,
    cuda_unavailable_reason,
)
from preblock.service.runtime.runner import Feeds
from preblock.service.runtime.session import CudaSession, Session
from tests.support.artifacts import STORED


def test_import_starts_no_telemetry(tmp_path: Path) -> None:
    """Telemetry of onnxruntime would write a file into TMPDIR."""
    kept = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    command = [sys.executable, "-c", "import preblock.service.runtime.session"]
    subprocess.run(command, env=kept | {"TMPDIR": str(tmp_path)}, check=True)
    assert list(tmp_path.iterdir()) == []


def test_invalid_graph_is_rejected_and_logged(
    tiny_repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_repository / "gpt" / "1", tmp_path / "1")
    (folder / GRAPH).write_bytes(b"no graph")
    with pytest.raises(ArtifactError) as refused:
        Session(folder)
    assert refused.value.field == GRAPH
    assert str(refused.value) == f"{GRAPH} cannot be loaded; see the log"
    assert str(folder) in caplog.text


@pytest.mark.skipif(has_driver(), reason="there is a GPU")
def test_gpu_session_without_a_gpu_is_rejected(tiny_repository: Path) -> None:
    with pytest.raises(Forbidden) as missing:
        load_driver()
    with pytest.raises(ProviderError) as refused:
        Session(tiny_repository / "gpt" / "1", CUDA)
    assert str(refused.value) == f"{CUDA} cannot be used: {missing.value.got}"


def test_probe_model_is_valid_and_doubles_input() -> None:
    onnx.checker.check_model(PROBE, full_check=True)
    probe = onnxruntime.InferenceSession(PROBE, providers=[CPU])
    assert probe.run(None, {"x": np.array([1.5], np.float32)})[0].tolist() == [3.0]


def test_provider_choice_records_its_reason() -> None:
    reason = cuda_unavailable_reason()
    assert choose_provider("auto") == ("auto", CPU if reason else CUDA, None if reason else CUDA, reason)
    assert choose_provider("cpu") == ("cpu", CPU, None, None)


SHAPES = [(1, 1, 1), (3, 7, 1), (3, 7, 3), (1, 9, 1), (200, 1, 200), (0, 3, 1)]


def feeds_of(session: Session, batch: int, length: int, offsets: int = 1) -> dict[str, NDArray[np.int64]]:
    random = np.random.default_rng([batch, length, offsets])
    high = {"offset": 300, "token_type_ids": 2}
    shapes = {tensor.name: (batch, length) for tensor in session.inputs} | {"offset": (offsets,)}
    return {name: random.integers(0, high.get(name, 30000), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(("model", "graph"), [("gpt2-small", GRAPH), ("minilm", GRAPH), ("minilm", "token.onnx")])
def test_cuda_session_with_io_binding_equals_plain_run(model_repository: Path, model: str, graph: str) -> None:
    folder = model_repository / model / "1"
    plain, bound = Session(folder, graph=graph), CudaSession(folder, CPU, graph=graph)
    for shape in SHAPES:
        feeds = feeds_of(plain, *shape)
        expected, found = plain.run(feeds), bound.run(feeds)
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == values.tobytes() for name, values in expected.items())


class Meeting(CudaSession):
    """Meets the other session in each run, and notes whether two of its own runs overlap."""

    def __init__(self, folder: Path, together: Barrier) -> None:
        super().__init__(folder, CPU)
        self.together, self.running, self.overlaps = together, False, False

    def _run_bound(self, feeds: Feeds, outputs: Sequence[str]) -> list[onnxruntime.OrtValue]:
        self.overlaps, self.running = self.overlaps or self.running, True
        self.together.wait(10)
        found = super()._run_bound(feeds, outputs)
        self.running = False
        return found


def test_gpu_session_runs_one_call_at_a_time(tiny_repository: Path) -> None:
    """Its calls share a stream. Sessions do not wait for each other."""
    together = Barrier(2)
    sessions = [Meeting(tiny_repository / "gpt" / "1", together) for _ in range(2)]
    feeds = {"input_ids": np.array([[1, 2]]), "offset": np.array([0])}

    def call(number: int) -> None:
        if number < 4:
            sessions[number % 2].run(feeds)
        else:
            with sessions[number % 2].run_on_gpu(feeds, "embeddings"):
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert [session.overlaps for session in sessions] == [False, False]


def test_tables_over_gpu_memory_limit_are_rejected(model_repository: Path) -> None:
    folder = model_repository / "minilm/1"
    size = (folder / DATA).stat().st_size
    with pytest.raises(ArtifactError) as refused:
        CudaSession(folder, CUDA, gpu_mem_limit_bytes=size - 1)
    assert (refused.value.field, refused.value.got) == ("model.onnx.data", f"{size} bytes")
    Session(folder, gpu_mem_limit_bytes=1)  # the limit is not for the CPU


def test_provider_for_exact_rows_is_cpu_with_auto() -> None:
    for stored, requested, provider in (
        ("gpt", "auto", CPU),
        ("bert", "auto", CPU),
        ("projected", "auto", CUDA),
        ("vit", "auto", CUDA),
        ("gpt", "cuda", CUDA),
    ):
        manifest, _ = read_with_identity(STORED / stored)
        found = ProviderChoice(requested, CUDA, CUDA, None).for_model(manifest)
        assert (found.active, found.reason is None) == (provider, provider == CUDA), stored
        assert ProviderChoice("auto", CPU, None, "no driver").for_model(manifest).active == CPU, stored
