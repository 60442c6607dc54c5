"""Every way of composing, exported for real, in a bare onnxruntime, against the position modules themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from preblock.export.exporter import ExportResult, export_loaded
from preblock.export.source import LoadedSource
from preblock.export.verification import verify
from preblock.models.config import FrontEndConfig
from preblock.models.embeddings import GridEmbedding, HierarchicalEmbedding, HybridEmbedding
from preblock.models.frontend import FrontEnd
from preblock.models.modules.grid import (
    FactorisedGridEncoding,
    LearnedGridEncoding,
    SinusoidalGridEncoding,
    grid_ids,
)
from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.steps import Positions, Scale, Segments, Step, Tokens
from preblock.service.artifacts.manifest import Manifest, Source
from preblock.service.runtime.providers import CPU
from tests.support.shared import Shared
from tests.support.weights import seeded_

V, D, M, H, W = 23, 8, 4, 3, 5
# Not in alphabetical order, and named like nodes of a graph: neither may change an input.
LEVELS = {"word": 7, "add": 3, "embedding": 5}
TOKENS = Tokens(rows=V, width=D)


def build(*steps: Step, max_len: int | None = None) -> FrontEnd:
    return FrontEnd(FrontEndConfig(family="custom", steps=(TOKENS, *steps), max_len=max_len))


FRONTENDS = {
    "levels": HierarchicalEmbedding(V, D, LEVELS),
    "segments": build(
        Positions(rows=H * W),
        Segments(rows=3, input="speaker"),
        Segments(table="tokens", rows=V, by=2.5),
        max_len=H * W,
    ),
    "hybrid": HybridEmbedding(V, D, M, max_len=2**31),
    "sinusoidal grid": build(Scale(by=3.0), Positions(table="exact", grid=(H, W)), max_len=H * W),
    "learned grid": GridEmbedding(V, D, (H, W)),
    "factorised grid": GridEmbedding(V, D, (H, W), "factorised"),
}
EVERY = pytest.mark.parametrize("kind", FRONTENDS)


@pytest.fixture(scope="module")
def exported(shared: Shared) -> dict[str, ExportResult]:
    """Export every front-end; the exporter proves each over its grid."""
    for seed, frontend in enumerate(FRONTENDS.values()):
        seeded_(frontend.eval(), seed)

    def fill(root: Path) -> dict[str, ExportResult]:
        return {
            kind: export_loaded(LoadedSource(frontend.data(), Source(kind="module")), kind.replace(" ", "-"), root)
            for kind, frontend in FRONTENDS.items()
        }

    return shared.build("steps", fill)


def run(exported: ExportResult, ids: Tensor, offset: list[int], **indices: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(exported.folder / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids.numpy(), "offset": np.array(offset)}
    return torch.from_numpy(session.run(None, feeds | {name: index.numpy() for name, index in indices.items()})[0])


def random(count: int, *shape: int) -> Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(count))


def with_tables(module: Any, *tables: tuple[str, Tensor]) -> Any:
    module.load_state_dict(dict(tables))
    return module.eval()


@EVERY
def test_verify_of_every_composition_is_bit_exact(kind: str, exported: dict[str, ExportResult]) -> None:
    parity = verify(exported[kind].folder).providers[CPU].outputs["embeddings"]
    assert parity.allowed_ulp == parity.max_ulp == parity.max_abs == 0
    assert {case.arguments["segments"] for case in parity.cases} == (
        {False, True} if FRONTENDS[kind].config.indices else {False}
    )


def test_levels_are_summed_in_order_then_added_to_tokens(exported: dict[str, ExportResult]) -> None:
    frontend, ids = FRONTENDS["levels"], random(V, 3, 6)
    indices = {name: random(rows, 3, 6) for name, rows in LEVELS.items()}
    module = with_tables(
        HierarchicalPositionalEncoding(D, LEVELS),
        *((f"tables.{name}", frontend.get_parameter(f"levels.{place}.weight")) for place, name in enumerate(LEVELS)),
    )
    x = frontend.tokens(ids)
    expected = module(x, torch.stack(list(indices.values()), dim=-1))
    assert torch.equal(run(exported["levels"], ids, [0], **indices), expected)
    # Another order of additions changes the last bits.
    one_by_one = x
    for place, index in enumerate(indices.values()):
        one_by_one = one_by_one + frontend.levels[str(place)](index)
    assert not torch.equal(one_by_one, expected)
    assert torch.equal(frontend(ids, indices=indices), expected)


def test_levels_manifest_has_named_inputs_and_no_max_len(exported: dict[str, ExportResult]) -> None:
    manifest = exported["levels"].manifest
    assert isinstance(manifest, Manifest)
    assert [tensor.name for tensor in manifest.graphs["model.onnx"].inputs] == ["input_ids", "offset", *LEVELS]
    assert manifest.max_len is None
    assert manifest.indices == FRONTENDS["levels"].signature.indices == LEVELS


def test_front_end_with_two_segment_inputs_matches_tables(exported: dict[str, ExportResult]) -> None:
    frontend, ids, speaker, types = FRONTENDS["segments"], random(V, 2, 6), random(3, 2, 6), random(V - 1, 2, 6)
    places = frontend.get_parameter("positions.weight")[4:10]
    x = frontend.tokens.weight[ids] + places + frontend.segments.weight[speaker]
    expected = x + frontend.tokens.weight[types] * 2.5
    found = run(exported["segments"], ids, [4], speaker=speaker, token_type_ids=types)
    assert torch.equal(found, expected)
    assert torch.equal(frontend(ids, 4, types, indices={"speaker": speaker}), expected)
    model = onnx.load(exported["segments"].folder / "model.onnx", load_external_data=False)
    assert sum(tensor.dims == [V, D] for tensor in model.graph.initializer) == 1


@pytest.mark.parametrize("offset", [[0], [M - 2], [M], [10**6], [2**31 - 6], [0, 10**9]])
def test_hybrid_rows_are_learned_then_exact_sinusoids(offset: list[int], exported: dict[str, ExportResult]) -> None:
    frontend, ids = FRONTENDS["hybrid"], random(V, 2, 6)
    module = with_tables(HybridPositionalEncoding(D, M), ("weight", frontend.get_parameter("positions.weight")))
    expected = module(frontend.tokens(ids), offset=torch.tensor(offset))
    assert torch.equal(run(exported["hybrid"], ids, offset), expected)
    assert torch.equal(frontend(ids, torch.tensor(offset)), expected)


GRIDS: dict[str, Callable[[FrontEnd], Any]] = {
    "sinusoidal grid": lambda _: SinusoidalGridEncoding(D, H, W).eval(),
    "learned grid": lambda frontend: with_tables(
        LearnedGridEncoding(D, H, W), ("weight", frontend.get_parameter("positions.weight"))
    ),
    "factorised grid": lambda frontend: with_tables(
        FactorisedGridEncoding(D, H, W),
        ("axes.tables.row", frontend.get_parameter("positions.rows.weight")),
        ("axes.tables.column", frontend.get_parameter("positions.columns.weight")),
    ),
}


@pytest.mark.parametrize("kind", GRIDS)
def test_grid_positions_are_row_major_whole_or_in_chunks(kind: str, exported: dict[str, ExportResult]) -> None:
    frontend, ids = FRONTENDS[kind], random(V, 2, H * W)
    x = frontend.tokens(ids) * (3.0 if kind == "sinusoidal grid" else 1.0)
    expected = GRIDS[kind](frontend)(x, grid_ids(H, W))
    assert torch.equal(run(exported[kind], ids, [0]), expected)
    chunks = [run(exported[kind], ids[:, start : start + 4], [start]) for start in range(0, H * W, 4)]
    assert torch.equal(torch.cat(chunks, dim=1), expected)
    assert torch.equal(frontend(ids), expected)


@pytest.mark.parametrize("kind", ["sinusoidal grid", "learned grid", "factorised grid"])
def test_grid_position_beyond_last_cell_is_rejected(kind: str) -> None:
    with pytest.raises(ValueError, match=r"length 1 \+ offset 15 = 16 exceeds the maximum length 15"):
        FRONTENDS[kind](random(V, 1, 1), H * W)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ({"word": torch.tensor([[7]])}, "word: got 7, expected 0 to 6"),
        ({"add": torch.tensor([[-1]])}, "add: got -1, expected 0 to 2"),
        ({"word": torch.tensor([[1, 2]])}, r"word: got shape \(1, 2\), expected \(1, 1\) or \(1, 1\)"),
        (
            {"day": torch.tensor([[0]])},
            "day: the front-end 'hierarchical' has no such index, expected word, add, em",
        ),
    ],
)
def test_invalid_level_index_is_rejected(indices: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FRONTENDS["levels"](torch.tensor([[1]]), indices=indices)


def test_token_type_ids_given_twice_are_rejected() -> None:
    types = torch.tensor([[0]])
    with pytest.raises(ValueError, match="token_type_ids is given twice: also in indices"):
        FRONTENDS["segments"](torch.tensor([[1]]), 0, types, indices={"token_type_ids": types})


def test_level_index_changes_only_its_own_table_rows(exported: dict[str, ExportResult]) -> None:
    ids, index = torch.tensor([[1]]), {name: torch.zeros((1, 1), dtype=torch.int64) for name in LEVELS}
    plain = run(exported["levels"], ids, [0], **index)
    for place, name in enumerate(LEVELS):
        changed = run(exported["levels"], ids, [0], **index | {name: torch.tensor([[2]])})
        table = FRONTENDS["levels"].get_parameter(f"levels.{place}.weight")
        torch.testing.assert_close(changed - plain, (table[2] - table[0]).reshape(1, 1, D))
