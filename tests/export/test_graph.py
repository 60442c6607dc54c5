"""Graphs written from steps: as files, and in onnxruntime against the PyTorch modules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

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
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.per_layer_config import PerLayerConfig
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_output import RotaryOutput
from preblock.models.steps import (
    Levels,
    Mask,
    Norm,
    Positions,
    Project,
    RmsNorm,
    Scale,
    Segments,
    Step,
    Tokens,
    Weights,
)
from preblock.service.artifacts.graphs import count_parameters
from preblock.service.artifacts.io import write
from preblock.service.artifacts.manifest import Manifest, Source
from preblock.service.artifacts.names import DATA, GRAPH, MANIFEST, NGRAM_ROWS_GRAPH
from preblock.service.artifacts.onnx_check import check_graphs, check_ngram_tables
from preblock.service.artifacts.parity import ParityReport
from preblock.service.runtime.providers import CPU
from tests.clients.client_matrix import check_standard
from tests.support.weights import seeded_

V, D, ROWS = 90, 40, 60
TOKENS = Tokens(rows=V, width=D)
EVERY_STEP: tuple[Step, ...] = (
    TOKENS,
    Scale(by=3.3, cast=True),
    Weights(rows=V),
    Segments(rows=3),
    Segments(rows=V, table="tokens", input="speaker", by=2.5),
    Levels(levels=(Segments(rows=5, input="word", by=0.3), Segments(rows=V, table="tokens", input="add"))),
    Positions(rows=ROWS, counts="mask", first=2),
    Mask(),
    Norm(eps=1e-5),
    RmsNorm(eps=1e-6),
    Project(width=6),
    Project(width=8, bias=None),
    Norm(eps=1e-5, bias=None),
    RmsNorm(eps=1e-6, weight=None),
)
YARN = RotaryConfig(dim=8, scaling="yarn", factor=4.0, original_len=32)
ROTARY = (
    RotaryOutput(config=RotaryConfig(dim=8)),
    RotaryOutput(name="wide", form="half", dtype="float16", config=RotaryConfig(dim=8, angles="float64")),
    RotaryOutput(name="yarn", form="fused", dtype="float16", config=YARN),
)
NGRAM = NgramConfig(layers=(0, 3), size=3, heads=2, width=128, base=31, multiple=8, seed=5, reset_id=2)
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"steps": EVERY_STEP, "arithmetic": name, "lookup": 2} for name in ("float32", "float16", "bfloat16")},
    "ids": {"steps": (TOKENS, Positions(rows=ROWS, counts="ids", first=1)), "padding_idx": 1, "max_len": ROWS - 1},
    "exact": {"steps": (TOKENS, Positions(table="exact", rows=ROWS, first=3))},
    "computed": {"steps": (TOKENS, Positions(table="exact", first=3)), "max_len": 10**6},
    "hybrid": {"steps": (TOKENS, Positions(table="hybrid", rows=5)), "max_len": 10**6},
    "recipe": {"steps": (TOKENS, Positions(table="pair_half", rows=ROWS, zero_row=1)), "arithmetic": "bfloat16"},
    "grid": {"steps": (TOKENS, Positions(table="exact", grid=(3, 5))), "max_len": 15},
    "factorised": {"steps": (TOKENS, Positions(table="factorised", grid=(3, 5))), "max_len": 15},
    "rotary": {"steps": (TOKENS, Norm(eps=1e-5)), "rotary": ROTARY, "max_len": 10**5},
    "layers": {
        "steps": (TOKENS, Scale(by=6.3)),
        "per_layer": PerLayerConfig(layers=3, width=32, rows=50, eps=1e-6),
        "lookup": 2,
    },
    "ngrams": {"steps": (TOKENS,), "ngrams": NGRAM},
    "scaled sum": {"steps": (TOKENS, Scale(by=2.5), Positions(rows=ROWS, first=2))},
}
"""Every kind of step, of positions and of further outputs."""


def build(kind: str) -> FrontEnd:
    torch.manual_seed(0)
    frontend = FrontEnd(FrontEndConfig(**{"family": "custom", "max_len": ROWS - 3, **CONFIGS[kind]})).eval()
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
        assert {entry.key for entry in model.metadata_props} > {"preblock.family", "preblock.vocab_size"}


def test_data_of_another_front_end_is_rejected(tmp_path: Path) -> None:
    """An artifact whose manifest describes other steps than its data file holds."""
    frontend = build("ids")
    put(frontend, tmp_path)
    tokens, positions = frontend.config.steps
    assert isinstance(positions, Positions)
    fewer = FrontEndConfig(family="f", max_len=None, steps=(tokens,))
    with pytest.raises(ValueError, match=r"positions\.weight: got \(.*\), expected no such weight"):
        read_data(tmp_path, fewer)
    larger = replace(frontend.config, steps=(tokens, replace(positions, rows=ROWS + 1)))
    with pytest.raises(ValueError, match=r"positions\.weight: got \(.*\), expected \("):
        read_data(tmp_path, larger)


@pytest.mark.parametrize("format_", FORMATS, ids=lambda format_: f"{format_.dtype}-{format_.scale}")
@pytest.mark.parametrize("kind", ["float32", "hybrid", "factorised", "layers", "ngrams"])
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
    frontend = build("scaled sum")
    frontend.tokens.to(torch.bfloat16)
    put(frontend, tmp_path)
    found = map_weights(tmp_path)["tokens.weight"]
    assert found.dtype == np.float32
    assert np.array_equal(found, frontend.tokens.weight.detach().float().numpy())


@pytest.mark.parametrize("kind", ["scaled sum", "exact", "recipe", "hybrid", "ids", "rotary"])
def test_kernel_of_manifest_has_places_and_rows_of_tables(kind: str, tmp_path: Path) -> None:
    frontend = build(kind)
    kernel = put(frontend, tmp_path).kernel
    if kind not in ("scaled sum", "exact"):
        assert kernel is None
        return
    assert kernel is not None
    tokens, positions = kernel.tokens, kernel.positions
    rows = np.memmap(tmp_path / DATA, np.float32, "r", offset=tokens.begin, shape=(tokens.rows, tokens.width))
    added = np.memmap(tmp_path / DATA, np.float32, "r", offset=positions.begin, shape=(positions.rows, tokens.width))
    ids = torch.arange(V)[: ROWS - 3].unsqueeze(0)
    expected = frontend(ids).detach().numpy()[0]
    first = positions.first
    found = rows[: ROWS - 3] * np.float32(tokens.scale) + added[first : first + ROWS - 3]
    assert np.array_equal(found, expected)


def test_ngram_rows_graph_takes_empty_batches_and_rows(tmp_path: Path) -> None:
    put(build("ngrams"), tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / NGRAM_ROWS_GRAPH, providers=["CPUExecutionProvider"])
    for shape in ((0, 3), (2, 0)):
        (found,) = session.run(None, {"ngram_row_ids": np.zeros((*shape, 2, 4), np.int64)})
        assert found.shape == (*shape, 2, 128)
