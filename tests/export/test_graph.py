"""The ONNX graph, in onnxruntime alone and as a file."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from preblock.export.description import describe_graph
from preblock.export.graph import export_graph, read_initializers
from preblock.models.embeddings import BertEmbeddings, GPT2Embeddings, TransformerEmbedding
from preblock.models.frontend import FrontEnd
from preblock.models.modules.initialisers import seeded_
from tests.clients.client_matrix import check_standard
from tests.support.shared import Shared

V, D, M = 23, 8, 10
FRONTENDS = {
    "bert": BertEmbeddings(V, D, M),
    "gpt2": GPT2Embeddings(V, D, M),
    "transformer": TransformerEmbedding(V, D, M),
    "bert without segments": BertEmbeddings(V, D, M, segments=0),
    "learned and scaled": TransformerEmbedding(V, D, M, "learned", padding_idx=3),
}
KINDS = pytest.mark.parametrize("kind", FRONTENDS)


@pytest.fixture(scope="module")
def graphs(shared: Shared) -> dict[str, Path]:
    """The folder of each front-end's graph."""
    for seed, frontend in enumerate(FRONTENDS.values()):
        seeded_(frontend.eval(), seed)

    def fill(root: Path) -> dict[str, Path]:
        folders = {kind: root / kind for kind in FRONTENDS}
        for kind, folder in folders.items():
            folder.mkdir()
            export_graph(FRONTENDS[kind], folder)
        return folders

    return shared.build("graphs", fill)


def feeds(frontend: FrontEnd, batch: int, length: int, offset: list[int]) -> dict[str, NDArray[np.int64]]:
    generator = np.random.Generator(np.random.PCG64([batch, length]))
    values = {"input_ids": generator.integers(0, V, (batch, length)), "offset": np.array(offset, np.int64)}
    if frontend.config.indices:
        values["token_type_ids"] = generator.integers(0, 2, (batch, length))
    return values


def by_torch(frontend: FrontEnd, values: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
    arguments = {name: torch.from_numpy(value) for name, value in values.items()}
    with torch.inference_mode():
        expected: NDArray[np.float32] = frontend(**arguments).numpy()
    return expected


def by_onnxruntime(graph: Path, values: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
    session = ort.InferenceSession(graph / "model.onnx", providers=["CPUExecutionProvider"])
    found: NDArray[np.float32] = session.run(None, values)[0]
    return found


@KINDS
@pytest.mark.parametrize("batch", [0, 1, 3, 64])
@pytest.mark.parametrize("length", [0, 1, 5, M])
def test_graph_matches_module_at_other_shapes(graphs: dict[str, Path], kind: str, batch: int, length: int) -> None:
    frontend, last = FRONTENDS[kind], M - length
    for offset in ([0], [last], [row % (last + 1) for row in range(batch)]):
        values = feeds(frontend, batch, length, offset)
        found, expected = by_onnxruntime(graphs[kind], values), by_torch(frontend, values)
        assert found.shape == (batch, length, D)
        # A norm sums, and the order of a sum is free; elsewhere every bit is equal.
        np.testing.assert_allclose(found, expected, rtol=0, atol=0 if frontend.config.exact else 1e-6)


def test_graph_output_depends_on_ids_and_token_types(graphs: dict[str, Path]) -> None:
    values = feeds(FRONTENDS["bert"], 2, 5, [0])
    found = by_onnxruntime(graphs["bert"], values)
    for name in ("input_ids", "token_type_ids"):
        changed = by_onnxruntime(graphs["bert"], values | {name: 1 - values[name] % 2})
        assert (np.abs(changed - found).max(axis=-1) > 1e-3).any(), name


@KINDS
def test_graph_axes_are_dynamic_and_named(graphs: dict[str, Path], kind: str) -> None:
    graph = describe_graph(graphs[kind] / "model.onnx")
    expected = [("input_ids", "int64", ("batch", "length")), ("offset", "int64", ("offsets",))]
    if FRONTENDS[kind].config.indices:
        expected.append(("token_type_ids", "int64", ("batch", "length")))
    assert [(spec.name, spec.dtype, spec.shape) for spec in graph.inputs] == expected
    assert [(spec.name, spec.dtype, spec.shape) for spec in graph.outputs] == [
        ("embeddings", "float32", ("batch", "length", D))
    ]


@KINDS
def test_graph_follows_onnx_standard(graphs: dict[str, Path], kind: str) -> None:
    check_standard(graphs[kind])


@KINDS
def test_weights_are_stored_in_external_data_file(graphs: dict[str, Path], kind: str) -> None:
    assert sorted(path.name for path in graphs[kind].iterdir()) == ["model.onnx", "model.onnx.data", "token.onnx"]
    model = onnx.load(graphs[kind] / "model.onnx", load_external_data=False)
    external = {tensor.name: tensor.external_data[0].value for tensor in model.graph.initializer if not tensor.raw_data}
    assert set(external.values()) == {"model.onnx.data"}
    assert {"frontend.tokens.weight"} < set(external)


@KINDS
def test_trained_weights_are_read_back_from_graph(graphs: dict[str, Path], kind: str) -> None:
    found, expected = read_initializers(graphs[kind]), FRONTENDS[kind].state_dict()
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@KINDS
def test_graph_file_contains_no_local_paths(graphs: dict[str, Path], kind: str) -> None:
    content = (graphs[kind] / "model.onnx").read_bytes()
    machine = [Path.cwd(), Path.home(), Path(torch.__file__).parents[1], graphs[kind], Path(__file__).parents[2]]
    for text in [*map(str, machine), "site-packages", ".py", "Traceback", "File "]:
        assert text.encode() not in content, text


def test_graph_of_same_front_end_has_same_bytes(graphs: dict[str, Path], tmp_path: Path) -> None:
    export_graph(FRONTENDS["bert"], tmp_path)
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / name).read_bytes() == (graphs["bert"] / name).read_bytes()
