"""Graphs and references of front-ends: every kind of step and output, against the PyTorch modules."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from preblock.export.description import describe_artifact
from preblock.export.errors import ParityError
from preblock.export.external_data import map_weights
from preblock.export.outputs import OUTPUTS, write_graphs
from preblock.export.parity import allowed_ulp, difference
from preblock.export.quantization import compare_tables
from preblock.export.reference import NumpyReference
from preblock.export.source import LoadedSource
from preblock.export.stored_tables import read_data
from preblock.export.table_formats import FORMATS, TableFormat
from preblock.export.torch_reference import TorchReference
from preblock.export.verification import prove_artifact
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_data import shapes_of
from preblock.models.modules.bias import T5Config
from preblock.models.steps import Positions, Scale
from preblock.service.artifacts.graphs import count_parameters
from preblock.service.artifacts.io import write
from preblock.service.artifacts.manifest import Manifest, Source
from preblock.service.artifacts.names import (
    GRAPH,
    LAYER_INPUTS_GRAPH,
    LAYER_TOKENS_GRAPH,
    MANIFEST,
    NGRAM_ROWS_GRAPH,
    NGRAMS_GRAPH,
    TOKEN_GRAPH,
    UNSCALED_GRAPH,
)
from preblock.service.artifacts.onnx_check import check_graphs, check_ngram_tables
from preblock.service.artifacts.parity import ParityReport
from preblock.service.core.types import Int64
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.session import Session
from tests.clients.client_matrix import check_standard
from tests.models.front_ends import CONFIGS, PADDING, M, V, config_of
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
    for reference in (TorchReference(frontend), NumpyReference(frontend.data())):
        prove_artifact(reference, tmp_path, CPU, lambda _: None)
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
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        limit = {} if frontend.config.max_len is None else {"preblock.max_len": str(frontend.config.max_len)}
        indices = {f"preblock.indices.{name}": str(count) for name, count in frontend.config.indices.items()}
        sizes = {"preblock.family": frontend.config.family, "preblock.vocab_size": str(V)}
        assert metadata == sizes | limit | indices


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
    biased = replace(frontend.config, bias=T5Config(heads=2, buckets=8, max_distance=9, bidirectional=True))
    with pytest.raises(ValueError, match=r"^bias\.weight: got nothing, expected \("):
        read_data(tmp_path, biased)


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


def test_ngram_rows_graph_takes_empty_batches_and_rows(tmp_path: Path) -> None:
    put(build("ngrams"), tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / NGRAM_ROWS_GRAPH, providers=["CPUExecutionProvider"])
    for shape in ((0, 3), (2, 0)):
        (found,) = session.run(None, {"ngram_row_ids": np.zeros((*shape, 2, 4), np.int64)})
        assert found.shape == (*shape, 2, 128)


@pytest.mark.parametrize(("lookup", "by"), [(1, 3.0), (2, 1.0), (3, 1.0)])
def test_lookup_without_embedding_scale_has_no_unscaled_output(lookup: int, by: float, tmp_path: Path) -> None:
    manifest = put(FrontEnd(config_of(Scale(by=by), Positions(rows=M), lookup=lookup)), tmp_path)
    assert UNSCALED_GRAPH not in manifest.graphs
    assert manifest.token_embeddings is not None
    assert not manifest.token_embeddings.scaled
    assert manifest.token_embeddings.embedding_scale == by


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [
        ("exact", (GRAPH, TOKEN_GRAPH, UNSCALED_GRAPH)),
        ("layers", (GRAPH, UNSCALED_GRAPH, LAYER_TOKENS_GRAPH, LAYER_INPUTS_GRAPH)),
        ("ngrams", (GRAPH, NGRAMS_GRAPH, NGRAM_ROWS_GRAPH)),
    ],
)
def test_proof_of_each_graph_finds_changed_tables(kind: str, graphs: tuple[str, ...], tmp_path: Path) -> None:
    frontend = build(kind)
    put(frontend, tmp_path)
    with torch.no_grad():
        for weight in frontend.parameters():
            (weight if kind == "ngrams" else weight[-1]).add_(1)  # no hash reaches the last row
    reference = TorchReference(frontend)
    for name in graphs:
        with pytest.raises(ParityError, match="of the graph differs from its reference"):
            OUTPUTS[name].prove(reference, Session(tmp_path, graph=name))


def calls(config: FrontEndConfig) -> list[dict[str, Int64]]:
    """Return inputs of the graph: every id, both ends of the positions, padding, offsets of each row, and no tokens."""
    random, last = np.random.default_rng(1), (config.max_len or M) - M
    ids = np.concatenate((np.arange(V), np.full(3 * M - V % M, PADDING))).reshape(-1, M)
    found = []
    for part, offset in (
        (ids, [0]),
        (ids, [last]),
        (ids[:4, -2:], [0, last, M // 2, 1]),
        (ids[:, :1], [(config.max_len or M) - 1]),
        (ids[:0], [0]),
        (ids[:2, :0], [0, 1]),
    ):
        feeds = {"input_ids": part, "offset": np.array(offset)}
        feeds |= {name: random.integers(0, count, part.shape) for name, count in config.indices.items()}
        if config.needs_mask:
            row, place = np.ogrid[: len(part), : part.shape[1]]
            feeds["attention_mask"] = ((place >= row) & (place < M - row)).astype(np.int64)
        found.append(feeds)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_references_give_same_vectors(name: str) -> None:
    config, frontend = CONFIGS[name], FrontEnd(CONFIGS[name])
    seeded_(frontend, 0)
    data = frontend.data()
    assert {name: values.shape for name, values in data.tensors.items()} == shapes_of(config)
    ours, module = NumpyReference(data), TorchReference.of(data)
    allowed = allowed_ulp(ours)
    assert allowed == allowed_ulp(module)
    assert (allowed == 0) == config.exact
    for feeds in calls(config):
        needed = {name: values for name, values in feeds.items() if name in ("input_ids", "offset", *config.needed)}
        for given in (feeds, needed):
            found, expected = (one.vectors(given) for one in (ours, module))
            assert (found.shape, found.dtype.name) == (expected.shape, "float32")
            assert not found.size or difference(found, expected)[1] <= allowed, feeds
        for scaled in (True, False):
            found, expected = (one.look_up(feeds["input_ids"], scaled) for one in (ours, module))
            assert np.array_equal(found, expected)


def test_narrow_weights_are_widened_at_lookup() -> None:
    config = config_of(Positions(rows=M))
    data = FrontEnd(config).data()
    for dtype in (np.float16, "bfloat16"):
        narrow = replace(data, tensors={name: values.astype(dtype) for name, values in data.tensors.items()})
        wide = replace(data, tensors={name: values.astype(np.float32) for name, values in narrow.tensors.items()})
        for feeds in calls(config):
            expected = TorchReference.of(wide).vectors(feeds)
            for reference in (NumpyReference(narrow), TorchReference.of(narrow)):
                assert np.array_equal(reference.vectors(feeds), expected)
