"""onnxruntime: which provider runs, and what is said where it cannot. Oracle: the raw tables."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from preblock.service.artifacts.manifest import DATA, EMBEDDINGS, GRAPH
from preblock.service.core.errors import ArtifactError, ProviderError
from preblock.service.runtime.session import CPU, CUDA, PROBE, VERSION, Session, choose, choose_provider, why_no_cuda

HAS_CUDA = CUDA in onnxruntime.get_available_providers()
cpu_package = pytest.mark.skipif(HAS_CUDA, reason="onnxruntime-gpu is installed")


def test_a_session_adds_the_rows_of_its_tables(tiny_repository: Path, tables: dict[str, NDArray[np.float32]]) -> None:
    session = Session(tiny_repository / "gpt" / "1")
    vectors = session.run({"input_ids": np.array([[1, 2], [3, 4]]), "offset": np.array([0, 4])})["embeddings"]
    expected = tables["tokens"][[[1, 2], [3, 4]]] + tables["positions"][[[0, 1], [4, 5]]]
    assert vectors.tobytes() == expected.tobytes()
    assert vectors.dtype == np.float32


def test_one_offset_broadcasts_over_the_batch(tiny_repository: Path) -> None:
    session = Session(tiny_repository / "gpt" / "1")
    ids = np.array([[1, 2], [3, 4]])
    one, each = (session.run({"input_ids": ids, "offset": np.array(offset)})["embeddings"] for offset in ([3], [3, 3]))
    assert one.tobytes() == each.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_number_of_threads_changes_no_bit(repository: Path, threads: int) -> None:
    ids = np.random.default_rng(0).integers(0, 30000, (8, 512))
    feeds = {"input_ids": ids, "offset": np.array([0]), "token_type_ids": np.zeros_like(ids)}
    folder = repository / "minilm" / "1"
    many, one = (Session(folder, threads=count).run(feeds)["embeddings"] for count in (threads, 1))
    assert many.tobytes() == one.tobytes()


def test_a_session_says_where_it_runs_and_what_it_takes(tiny_repository: Path) -> None:
    session = Session(tiny_repository / "bert" / "1")
    assert session.provider == CPU
    assert [(t.name, t.dtype, t.shape) for t in session.inputs] == [
        ("input_ids", "int64", ("batch", "length")),
        ("offset", "int64", ("offsets",)),
        ("token_type_ids", "int64", ("batch", "length")),
    ]
    assert [(t.name, t.dtype, t.shape) for t in session.outputs] == [("embeddings", "float32", ("batch", "length", 4))]


@pytest.mark.parametrize("name", [GRAPH, DATA])
def test_a_missing_file_is_refused_by_name(tiny_repository: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_repository / "gpt" / "1", tmp_path / "1")
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=f"^{name}: got no such file, allowed a file of the artifact$"):
        Session(folder)


def test_a_graph_that_is_none_is_refused_and_the_log_says_why(
    tiny_repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_repository / "gpt" / "1", tmp_path / "1")
    (folder / GRAPH).write_bytes(b"no graph")
    with pytest.raises(ArtifactError) as refused:
        Session(folder)
    assert refused.value.field == GRAPH
    assert (
        str(refused.value) == f"{GRAPH}: got what cannot be loaded; the log says why, allowed a graph that can be run"
    )
    assert str(folder) in caplog.text


@cpu_package
def test_the_cpu_package_says_why_it_has_no_cuda() -> None:
    assert why_no_cuda() == "this onnxruntime has no CUDA: install preblock[gpu] in place of preblock[cpu]"


@cpu_package
def test_cuda_that_cannot_be_used_is_refused_and_never_replaced() -> None:
    with pytest.raises(ProviderError) as refused:
        choose_provider("cuda")
    assert str(refused.value) == f"provider: got cuda, allowed auto or cpu, since {why_no_cuda()}"


@cpu_package
@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider':UserWarning")
def test_a_session_that_fell_back_is_refused(tiny_repository: Path) -> None:
    with pytest.raises(
        ProviderError, match=f"^provider: got {CPU}, allowed {CUDA}, which onnxruntime could not start$"
    ):
        Session(tiny_repository / "gpt" / "1", CUDA)


def test_the_probe_is_the_model_that_it_says() -> None:
    onnx.checker.check_model(PROBE, full_check=True)
    probe = onnxruntime.InferenceSession(PROBE, providers=[CPU])
    assert probe.run(None, {"x": np.array([1.5], np.float32)})[0].tolist() == [3.0]


@cpu_package
def test_auto_takes_the_cpu_where_there_is_nothing_else() -> None:
    assert choose_provider("auto") == CPU


def test_cpu_is_the_cpu() -> None:
    assert choose_provider("cpu") == CPU


def test_the_version_is_that_of_onnxruntime() -> None:
    assert onnxruntime.__version__ == VERSION


def test_the_probe_of_a_provider_is_a_graph_that_adds() -> None:
    found = onnxruntime.InferenceSession(PROBE).run(None, {"x": np.ones(1, np.float32)})
    assert found[0].tolist() == [2.0]


def test_why_a_provider_was_chosen_is_kept() -> None:
    reason = why_no_cuda()
    assert choose("auto") == ("auto", CPU if reason else CUDA, None if reason else CUDA, reason)
    assert choose("cpu") == ("cpu", CPU, None, None)


def test_calls_of_one_token_are_those_of_any_other(
    tiny_repository: Path, tables: dict[str, NDArray[np.float32]]
) -> None:
    session = Session(tiny_repository / "gpt" / "1")
    for token, offset in ((1, 0), (4, 2), (1, 5)):
        ids, place = np.array([[token]]), np.array([offset])
        vectors = session.run_single({"input_ids": ids, "offset": place, "further": ids}, EMBEDDINGS)
        assert vectors.tobytes() == (tables["tokens"][token] + tables["positions"][offset]).tobytes()
        assert vectors.shape == (1, 1, 4)


def test_what_a_call_of_one_token_gave_stays_as_it_was(tiny_repository: Path) -> None:
    session = Session(tiny_repository / "gpt" / "1")
    found = [
        session.run_single({"input_ids": np.array([[i % 3]]), "offset": np.array([0])}, EMBEDDINGS) for i in range(6)
    ]
    assert [vectors.tobytes() for vectors in found[:3]] == [vectors.tobytes() for vectors in found[3:]]
    assert len({vectors.tobytes() for vectors in found}) == 3


def test_calls_of_one_token_in_several_threads_are_right(
    tiny_repository: Path, tables: dict[str, NDArray[np.float32]]
) -> None:
    session = Session(tiny_repository / "gpt" / "1")

    def ask(number: int) -> bool:
        token, offset = number % 7, number % 5
        vectors = session.run_single({"input_ids": np.array([[token]]), "offset": np.array([offset])}, EMBEDDINGS)
        return bool(vectors.tobytes() == (tables["tokens"][token] + tables["positions"][offset]).tobytes())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(5000)))
