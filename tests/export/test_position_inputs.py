"""Graphs with an input for position embeddings: equal bits, and written only for consecutive rows of a table."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from preblock.export import export_module
from preblock.export.errors import ParityError
from preblock.export.exporter import ExportResult, export
from preblock.export.parity import prove_positioned
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.service.artifacts.io import read, write
from preblock.service.artifacts.manifest import MANIFEST, POSITIONED, Manifest
from preblock.service.artifacts.records import PositionTable
from preblock.service.core.auth import SERVICE
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.position_table import map_positions
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.session import Session
from tests.families.library_models import save

FAMILIES = {"gpt2": 0, "bart/decoder": 2, "bert": 0, "ctrl": 0, "roberta": None, "llama": None}
"""The row of position 0; None where there is no such graph: padding counts for nothing, or nothing is looked up."""
VOCAB, WIDTH, LONG = 13, 6, 512
"""Sizes of a custom module; so many rows are in the data file."""
SUMS = {"gpt2", "ctrl"}
"""Families with vectors computed by the fused kernel: sums of two rows."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExportResult]:
    root = tmp_path_factory.mktemp("positioned")
    made = {}
    for name in FAMILIES:
        family, _, side = name.partition("/")
        save(name, root / "checkpoints" / family)
        made[name] = export(str(root / "checkpoints" / family), family, root / "models", side=side or None)
    return made


@pytest.mark.parametrize(("name", "first"), FAMILIES.items())
def test_positioned_graph_exists_only_for_consecutive_table_rows(
    artifacts: dict[str, ExportResult], name: str, first: int | None
) -> None:
    manifest = artifacts[name].manifest
    assert isinstance(manifest, Manifest)
    outputs = artifacts[name].parity.providers[CPU].outputs
    held = {"positioned.onnx" in manifest.graphs, POSITIONED in outputs, manifest.positions is not None}
    assert held == {first is not None}
    if manifest.positions is not None:
        assert manifest.positions.first == first
        assert outputs[POSITIONED].max_abs == 0
        model = onnx.load(artifacts[name].folder / "positioned.onnx", load_external_data=False)
        assert "offset" not in {value.name for value in model.graph.input}
        assert [value.name for value in model.graph.output] == ["embeddings"]
    assert (manifest.kernel is not None) == (name in SUMS)


class Places(nn.Module):
    """The sum of tokens and positions, with a buffer of rows by position, as BERT of transformers has."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONG, WIDTH)
        self.register_buffer("rows", torch.tensor(rows), persistent=False)

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        rows = self.get_buffer("rows")[torch.arange(input_ids.shape[1]) + offset.unsqueeze(1)]
        vectors: Tensor = self.tokens(input_ids) + self.places(rows)
        return vectors


@pytest.mark.parametrize(
    ("rows", "first"),
    [
        ([*range(LONG)], 0),
        ([*range(2, 42)], 2),
        ([*range(16), *range(8)], None),
        ([0, 1, 2, *(3 + place // 4 for place in range(LONG))], None),
        ([*range(LONG - 2), LONG - 1, LONG - 2], None),
    ],
    ids=["buffer", "shifted", "repeated", "buckets", "swapped end"],
)
def test_all_positions_decide_about_positioned_graph(tmp_path: Path, rows: list[int], first: int | None) -> None:
    exported = export_module(Places(rows), "places", tmp_path, vocab_size=VOCAB, max_len=len(rows), exact=True)
    assert isinstance(exported.manifest, Manifest)
    positions = exported.manifest.positions
    assert (positions and positions.first) == first
    assert (exported.folder / "positioned.onnx").exists() == (first is not None)


def test_quantized_export_has_no_positioned_graph(artifacts: dict[str, ExportResult], tmp_path: Path) -> None:
    checkpoint = artifacts["gpt2"].folder.parents[2] / "checkpoints/gpt2"
    for dtype in ("float16", "int8"):
        assert "positioned.onnx" not in export(str(checkpoint), dtype, tmp_path, dtype=dtype).manifest.graphs


def test_positioned_proof_detects_wrong_first_row(artifacts: dict[str, ExportResult]) -> None:
    folder, manifest = artifacts["bart/decoder"].folder, artifacts["bart/decoder"].manifest
    assert isinstance(manifest, Manifest)
    assert manifest.front_end is not None
    assert manifest.positions is not None
    table = manifest.positions.model_copy(update={"first": 1})
    positions = map_positions(folder, manifest.model_copy(update={"positions": table}))
    frontend = FrontEnd(FrontEndConfig.from_document(manifest.front_end))
    with pytest.raises(ParityError, match="embeddings at given positions"):
        prove_positioned(frontend.signature, Session(folder, graph="positioned.onnx"), positions, Session(folder))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (None, "positions: there is no table for positioned.onnx"),
        ({"first": 1}, "positions: the table gives "),  # those of others: the plain graph disagrees
        ({"first": 3}, "positions.rows: got "),
        ({"rows": 2**40}, "positions.rows: got "),
        ({"begin": 2**50}, "positions.rows: got "),
    ],
)
def test_manifest_with_wrong_position_table_is_rejected(
    artifacts: dict[str, ExportResult], tmp_path: Path, changed: dict[str, int] | None, message: str
) -> None:
    shutil.copytree(artifacts["bart/decoder"].folder.parent, tmp_path / "bart")
    file = tmp_path / "bart/1" / MANIFEST
    manifest = read(Manifest, file)
    assert manifest.positions is not None
    table = None if changed is None else PositionTable(**(manifest.positions.model_dump() | changed))
    write(manifest.model_copy(update={"positions": table}), file)
    with pytest.raises(ArtifactError, match=message):
        Repository(tmp_path, CPU, 1)


@pytest.mark.parametrize("name", [name for name, first in FAMILIES.items() if first is not None])
def test_served_positioned_graph_matches_plain_graph(artifacts: dict[str, ExportResult], name: str) -> None:
    folder = artifacts[name].folder
    model = next(
        model for model in Repository(folder.parents[1], CPU, 1).all(SERVICE) if model.name == folder.parent.name
    )
    assert isinstance(model, TokenModel)
    assert model.manifest.max_len is not None
    assert model.positions is not None
    plain, last = model.sessions["model.onnx"], model.manifest.max_len
    for shape, offset in (
        ((1, 1), [0]),
        ((1, 1), [last - 1]),
        ((3, 2), [1]),
        ((2, last), [0]),
        ((2, 2), [0, 1]),
        ((2, 1), [0, last - 1]),
    ):
        feeds: dict[str, NDArray[Any]] = {"input_ids": np.full(shape, 5), "offset": np.array(offset)}
        feeds |= {name: np.ones(shape, np.int64) for name in model.manifest.indices}
        expected = plain.run(feeds, ["embeddings"])["embeddings"]
        for _ in range(2):  # a small call is bound by then
            assert model.run(feeds, ("embeddings",))["embeddings"].tobytes() == expected.tobytes()
