"""Graphs written from steps: as files, and in onnxruntime against the PyTorch modules."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from preblock.export.description import describe_artifact
from preblock.export.external_data import map_weights
from preblock.export.outputs import write_graphs
from preblock.export.quantization import compare_tables
from preblock.export.source import LoadedSource
from preblock.export.stored_tables import read_data
from preblock.export.table_formats import FORMATS, TableFormat
from preblock.export.torch_reference import TorchReference
from preblock.export.verification import prove_artifact
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.steps import (
    Positions,
)
from preblock.service.artifacts.graphs import count_parameters
from preblock.service.artifacts.io import write
from preblock.service.artifacts.manifest import Manifest, Source
from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST, NGRAM_ROWS_GRAPH
from preblock.service.artifacts.onnx_check import check_graphs, check_ngram_tables
from preblock.service.artifacts.parity import ParityReport
from preblock.service.runtime.providers import CPU
from tests.clients.client_matrix import check_standard
from tests.models.front_ends import CONFIGS, M
from tests.support.weights import seeded_

KERNELS = {"learned", "first", "exact rows", "grid"}
"""Sums of a row of tokens and of a row of positions."""


def build(kind: str) -> FrontEnd:
    torch.manual_seed(0)
    frontend = FrontEnd(CONFIGS[kind]).eval()
    seeded_(frontend, 1)
    return frontend


def put(frontend: FrontEnd, folder: Path, format_: TableFormat | None = None) -> Manifest:
    """Write the artifact of a front-end, without its proof."""
    folder.mkdir(exist_ok=True)
    data = frontend.data()
    write_graphs(data, folder, format_=format_)
    manifest = describe_artifact(LoadedSource(data, Source(kind="module")), folder, lambda _: None)
    assert isinstance(manifest, Manifest)
    write(manifest, folder / MANIFEST)
    check_graphs(folder, manifest)
    check_ngram_tables(folder, manifest)
    return manifest


@pytest.mark.parametrize("kind", CONFIGS)
def test_written_graphs_equal_module_and_hold_no_more(kind: str, tmp_path: Path) -> None:
    frontend = build(kind)
    manifest = put(frontend, tmp_path)
    assert list(manifest.versions) == ["preblock", "onnx"]
    prove_artifact(TorchReference(frontend), tmp_path, CPU, lambda _: None)
    assert (manifest.kernel is not None) == (kind in KERNELS)
    if kind != "rotary":  # the evaluator would compare halves
        check_standard(tmp_path, frontend.config.indices)
    weights = read_data(tmp_path, frontend.config)[0].tensors
    for name, weight in frontend.state_dict().items():
        assert np.array_equal(weights[name], weight.numpy())
    counts = count_parameters(tmp_path, manifest, ParityReport(providers={}))
    assert counts == {name: weight.numel() for name, weight in frontend.state_dict().items()}
    for file in manifest.graphs:
        model = onnx.load(tmp_path / file, load_external_data=False)
        read = {value for node in model.graph.node for value in node.input}
        made = {value for node in model.graph.node for value in node.output}
        assert made <= read | {value.name for value in model.graph.output}
        assert file == GRAPH or {tensor.name for tensor in model.graph.initializer} <= read
        assert (model.producer_name, model.graph.name) == ("preblock", Path(file).stem)
        assert model.doc_string.startswith("The ")
        assert {entry.key for entry in model.metadata_props} >= {"preblock.family", "preblock.vocab_size"}


def test_data_of_another_front_end_is_rejected(tmp_path: Path) -> None:
    """An artifact whose manifest describes other steps than its data file holds."""
    frontend = build("ids")
    put(frontend, tmp_path)
    tokens, positions = frontend.config.steps
    assert isinstance(positions, Positions)
    fewer = FrontEndConfig(family="f", max_len=None, steps=(tokens,))
    with pytest.raises(ValueError, match=r"positions\.weight: got \(.*\), expected no such weight"):
        read_data(tmp_path, fewer)
    larger = replace(frontend.config, steps=(tokens, replace(positions, rows=M + 5)))
    with pytest.raises(ValueError, match=r"positions\.weight: got \(.*\), expected \("):
        read_data(tmp_path, larger)


@pytest.mark.parametrize("format_", FORMATS, ids=lambda format_: f"{format_.dtype}-{format_.scale}")
@pytest.mark.parametrize("kind", ["every step in float32", "hybrid", "factorised", "layers", "ngrams"])
def test_written_tables_widen_to_rounded_values(kind: str, format_: TableFormat, tmp_path: Path) -> None:
    frontend = build(kind)
    manifest = put(frontend, tmp_path / "stored", format_)
    assert (manifest.dtype, manifest.scale, manifest.block) == (format_.dtype, format_.scale, format_.block)
    assert manifest.kernel is None
    data = frontend.data()
    errors = compare_tables(data, format_, tmp_path / "stored")
    rounded = build(kind)
    with torch.no_grad():
        for name in errors:
            table = data.tensors[name]
            whole = format_.whole(iter([table]))
            widened = format_.widen(whole | format_.narrow(table, whole))
            rounded.get_parameter(name).copy_(torch.from_numpy(np.ascontiguousarray(widened)))
    prove_artifact(TorchReference(rounded), tmp_path / "stored", CPU, lambda _: None)
    check_standard(tmp_path / "stored", frontend.config.indices)


def test_narrow_token_table_is_written_as_float32(tmp_path: Path) -> None:
    frontend = build("first")
    frontend.tokens.to(torch.bfloat16)
    put(frontend, tmp_path)
    found = map_weights(tmp_path)["tokens.weight"]
    assert found.dtype == np.float32
    assert np.array_equal(found, frontend.tokens.weight.detach().float().numpy())


@pytest.mark.parametrize("kind", sorted(KERNELS))
def test_kernel_of_manifest_has_places_and_rows_of_tables(kind: str, tmp_path: Path) -> None:
    frontend = build(kind)
    kernel = put(frontend, tmp_path).kernel
    assert kernel is not None
    tokens, positions = kernel.tokens, kernel.positions
    rows = np.memmap(tmp_path / DATA, np.float32, "r", offset=tokens.begin, shape=(tokens.rows, tokens.width))
    added = np.memmap(tmp_path / DATA, np.float32, "r", offset=positions.begin, shape=(positions.rows, tokens.width))
    expected = frontend(torch.arange(M).unsqueeze(0)).detach().numpy()[0]
    found = rows[:M] * np.float32(tokens.scale) + added[positions.first : positions.first + M]
    assert np.array_equal(found, expected)


def test_ngram_rows_graph_takes_empty_batches_and_rows(tmp_path: Path) -> None:
    put(build("ngrams"), tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / NGRAM_ROWS_GRAPH, providers=["CPUExecutionProvider"])
    for shape in ((0, 3), (2, 0)):
        (found,) = session.run(None, {"ngram_row_ids": np.zeros((*shape, 2, 4), np.int64)})
        assert found.shape == (*shape, 2, 128)
