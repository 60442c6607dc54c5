"""Position modules of sequences: learned, sinusoidal and hybrid. Oracles: torch's embedding, and transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Pix2StructVisionConfig
from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.pix2struct.modeling_pix2struct import Pix2StructVisionEmbeddings

from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.alibi import AlibiBias
from preblock.models.modules.grid import FactorisedGridEncoding, LearnedGridEncoding, SinusoidalGridEncoding, grid_ids
from preblock.models.modules.hierarchical_positions import HierarchicalPositionalEncoding
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from preblock.models.modules.relative_positions import RelativeSinusoid
from preblock.models.modules.rotary_embedding import RotaryEmbedding
from preblock.models.modules.sinusoids import Sinusoid, sinusoid
from preblock.models.modules.stems import PatchConfig, PatchStem
from preblock.models.steps import Positions, Tokens
from tests.models.front_ends import NGRAMS
from tests.models.modules.published_rotary import CONFIGS, IDS
from tests.models.rejections import rejection

SEQUENCE = (LearnedPositionalEncoding, SinusoidalPositionalEncoding, HybridPositionalEncoding)
Module = LearnedPositionalEncoding | SinusoidalPositionalEncoding | HybridPositionalEncoding
KINDS = pytest.mark.parametrize("kind", SEQUENCE)
D, M, FAR = 6, 10, 40
NO_IDS = torch.zeros((1, FAR), dtype=torch.int64)
"""Ids of tokens: a module returns its vectors alone."""


def rows_of(module: Module) -> Tensor:
    """The vectors of the positions 0 to FAR - 1, or to M - 1: (FAR or M, D)."""
    sinusoids: Tensor = create_sinusoidal_embeddings(FAR, D, torch.empty(FAR, D))
    if isinstance(module, SinusoidalPositionalEncoding):
        return sinusoids
    learned = nn.Embedding(M, D, _weight=module.weight)(torch.arange(M))
    return torch.cat((learned, sinusoids[M:])) if isinstance(module, HybridPositionalEncoding) else learned


@KINDS
def test_offset_and_ids_select_positions(kind: type[Module]) -> None:
    module, x = kind(D, M).eval(), torch.randn(3, 2, D)
    own, rows = module(NO_IDS[:, :M])[0], rows_of(module)[:M]
    assert kind is not LearnedPositionalEncoding or torch.equal(own, rows)
    torch.testing.assert_close(own, rows, rtol=0, atol=1e-6)
    for given, positions in (
        ({}, [0, 1]),
        ({"offset": 3}, [3, 4]),
        ({"offset": M - 2}, [M - 2, M - 1]),
        ({"offset": torch.tensor([3])}, [3, 4]),
        ({"offset": torch.tensor([0, 8, 3])}, [[0, 1], [8, 9], [3, 4]]),
        ({"position_ids": torch.tensor([[7, 0]])}, [7, 0]),
        ({"position_ids": torch.tensor([[7, 0], [9, 9], [1, 3]])}, [[7, 0], [9, 9], [1, 3]]),
    ):
        assert torch.equal(module(x, **given), x + own[torch.tensor(positions)]), given


@pytest.mark.parametrize("kind", [SinusoidalPositionalEncoding, HybridPositionalEncoding])
def test_positions_beyond_rows_are_sinusoids(kind: type[Module]) -> None:
    module, x = kind(D, M).eval(), torch.randn(3, 2, D)
    rows = rows_of(module)
    torch.testing.assert_close(module(NO_IDS)[0], rows, rtol=0, atol=2e-7)
    found = module(x, offset=torch.tensor([0, M - 1, 30]))
    expected = x + torch.stack((rows[:2], rows[M - 1 : M + 1], rows[30:32]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    far = torch.tensor([[10**6, 2**31 - 1]])
    assert torch.equal(module(NO_IDS[:, :2], far)[0], sinusoid(far[0], D))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@KINDS
def test_invalid_offset_or_position_ids_are_rejected(kind: type[Module]) -> None:
    module, x = kind(D, M), torch.randn(2, 4, D)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"offset": -1}, "offset: got -1, expected 0 or more"),
        ({"offset": torch.tensor([2, -1])}, "offset: got -1, expected 0 or more"),
        *(({"offset": zeros(*shape)}, "offset: got shape") for shape in ((3,), (2, 1), (2, 2), (2, 1, 1))),
        ({"offset": 1.5}, "offset: got torch.float32, expected whole numbers"),
        ({"position_ids": torch.full((1, 4), 0.5)}, "position_ids: got torch.float32, expected whole numbers"),
        ({"position_ids": torch.tensor([[1, -2, 0, 0]])}, "position_ids: got -2, expected 0 or more"),
        *(
            ({"position_ids": zeros(*shape)}, f"position_ids: got shape {shape}, expected (1, 4) or (2, 4)")
            for shape in ((4,), (3, 4), (2, 3), (1, 2, 4))
        ),
        ({"position_ids": zeros(1, 4), "offset": 1}, "exclude each other"),
        ({"position_ids": zeros(1, 4), "offset": torch.tensor([0])}, "exclude each other"),
    ]
    for given, message in cases:
        assert message in rejection(ValueError, module, x, **given), given


def test_position_beyond_learned_table_is_rejected() -> None:
    module = LearnedPositionalEncoding(D, M)
    for length, offset, named in (
        (M + 1, 0, 0),
        (1, M, M),
        (4, torch.tensor([0, M - 3]), M - 3),
        (1, 2**62, 2**62),
    ):
        message = f"length {length} + offset {named} = {length + named} exceeds the maximum length {M}"
        assert rejection(ValueError, module, torch.randn(2, length, D), offset=offset) == message
    ids = torch.tensor([[0, M]])
    assert rejection(ValueError, module, NO_IDS[:, :2], ids) == "position_ids: got 10, expected 0 to 9"


EVERY: dict[str, Callable[..., nn.Module]] = {
    **{kind.__name__: lambda kind=kind, **given: kind(64, 50, **given) for kind in SEQUENCE},
    **{
        kind.__name__: lambda kind=kind, **given: kind(64, 5, 10, **given)
        for kind in (LearnedGridEncoding, SinusoidalGridEncoding, FactorisedGridEncoding)
    },
    "hierarchical": lambda **given: HierarchicalPositionalEncoding(64, {"sentence": 5, "word": 10}, **given),
}


@pytest.mark.parametrize("name", EVERY)
def test_dropout_applies_after_sum_only_in_training(name: str) -> None:
    torch.manual_seed(0)
    module, x = EVERY[name](dropout=0.5), torch.randn(8, 50, 64, requires_grad=True)
    given = (torch.randint(5, (8, 50, 2)),) if name == "hierarchical" else ()
    expected = x + module(zeros(8, 50), *given)
    assert torch.equal(module.eval()(x, *given), expected)
    found = module.train()(x, *given)
    kept = found != 0
    assert torch.equal(found[kept], (expected * 2)[kept])
    assert 0.48 < kept.float().mean() < 0.52
    found.sum().backward()
    assert all(table.grad is not None and table.grad.any() for table in module.parameters())


def test_positions_beyond_rows_have_no_gradient() -> None:
    module = HybridPositionalEncoding(D, M, dropout=0.0)
    module(torch.zeros(3, 2, D), offset=M - 1).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad[:, 0].tolist() == [0.0] * (M - 1) + [3.0]


def test_base_and_padded_width_reach_sinusoids() -> None:
    for kind in (SinusoidalPositionalEncoding, HybridPositionalEncoding):
        assert "d_model: got 7, expected an even width" in rejection(ValueError, kind, 7, M)
        found = kind(7, M, base=500.0, pad_odd=True)(NO_IDS)[0]
        assert torch.equal(found[M:], sinusoid(torch.arange(M, FAR), 7, 500.0, True))
    assert torch.equal(SinusoidalPositionalEncoding(8, 2100).table, sinusoid(torch.arange(2100), 8))
    warm = HybridPositionalEncoding(D, M, init="sinusoidal")
    assert torch.equal(warm(NO_IDS), SinusoidalPositionalEncoding(D, 0)(NO_IDS))
    assert "max_len: got 0, expected 1 or more" in rejection(ValueError, HybridPositionalEncoding, D, 0)


TEXT = {"paragraph": 3, "sentence": 4, "word": 5}


@pytest.mark.parametrize("levels", [TEXT, {"word": 9}], ids=["text", "one level"])
@pytest.mark.parametrize("batch", [1, 2], ids=["ids for all rows", "ids per row"])
def test_levels_match_sum_of_torch_embeddings(levels: dict[str, int], batch: int) -> None:
    torch.manual_seed(0)
    module, x = HierarchicalPositionalEncoding(D, levels).eval(), torch.randn(2, 7, D)
    ids = torch.stack([torch.randint(rows, (batch, 7)) for rows in levels.values()], dim=-1)
    oracles = [nn.Embedding(rows, D, _weight=module.tables[level]) for level, rows in levels.items()]
    expected = x + sum(oracle(ids[..., level]) for level, oracle in enumerate(oracles))
    assert module(x[:, :0], ids[:, :0]).shape == (2, 0, D)
    torch.testing.assert_close(module(x, ids), expected, rtol=0, atol=1e-6)


def test_invalid_levels_are_rejected() -> None:
    module, x = HierarchicalPositionalEncoding(D, TEXT), torch.randn(2, 2, D)
    for index, message in (
        ([3, 0, 0], "paragraph got 3, expected 0 to 2"),
        ([0, 4, 9], "sentence got 4, expected 0 to 3"),
        ([0, 0, 5], "word got 5, expected 0 to 4"),
        ([0, -1, 0], "sentence got -1, expected 0 to 3"),
    ):
        assert rejection(ValueError, module, x, torch.tensor([[[2, 3, 4], index]])) == f"position_ids: {message}"
    for shape in ((1, 2), (1, 2, 2), (3, 2, 3), (1, 1, 3), (1, 1, 2, 3)):
        message = f"position_ids: got shape {shape}, expected (1, 2, 3) or (2, 2, 3)"
        assert rejection(ValueError, module, x, torch.zeros(shape, dtype=torch.int64)) == message
    assert rejection(ValueError, HierarchicalPositionalEncoding, D, {}) == "levels: got none, expected one or more"


Grid = FactorisedGridEncoding | LearnedGridEncoding | SinusoidalGridEncoding
GRID_KINDS = pytest.mark.parametrize("kind", [FactorisedGridEncoding, LearnedGridEncoding, SinusoidalGridEncoding])

GRID_D, H, W = 8, 3, 5
NO_PATCHES = torch.zeros((1, H * W), dtype=torch.int64)
"""Ids of patches: a module returns its vectors alone."""


def detr(height: int, width: int) -> Tensor:
    """Return DETR's vectors (height, width, D). DETR counts rows and columns from 1."""
    shape = torch.Size((1, GRID_D, height, width))
    vectors: Tensor = DetrSinePositionEmbedding(GRID_D // 2)(shape, torch.device("cpu"), torch.float64)
    return vectors[0].permute(1, 2, 0).float()


def test_sinusoidal_grid_matches_detr() -> None:
    module = SinusoidalGridEncoding(GRID_D, H, W)
    found = module(NO_PATCHES).reshape(H, W, GRID_D)
    torch.testing.assert_close(found[1:, 1:], detr(H - 1, W - 1), rtol=0, atol=1e-6)
    for height, width in ((2, 2), (W, H), (40, 2)):  # smaller, turned, beyond the table
        ids = torch.zeros((1, height * width), dtype=torch.int64)
        found = module(ids, grid_ids(height, width) + 1)[0]
        torch.testing.assert_close(found, detr(height, width).flatten(0, 1), rtol=0, atol=1e-6)


def test_sinusoidal_grid_uses_given_base() -> None:
    found = SinusoidalGridEncoding(GRID_D, H, W, base=16.0)(NO_PATCHES[:, :1], torch.tensor([[[0, 8]]]))
    # Each axis has four columns: the second wavelength is the square root of the base.
    expected = [0.0, 1.0, 0.0, 1.0, *(f(torch.tensor(angle)) for angle in (8.0, 2.0) for f in (torch.sin, torch.cos))]
    torch.testing.assert_close(found[0, 0], torch.tensor(expected))


def test_factorised_grid_matches_pix2struct() -> None:
    torch.manual_seed(0)
    config = Pix2StructVisionConfig(
        hidden_size=GRID_D, patch_embed_hidden_size=GRID_D, seq_len=max(H, W), dropout_rate=0.0
    )
    library = Pix2StructVisionEmbeddings(config).eval()  # type: ignore[arg-type]
    module, patches = FactorisedGridEncoding(GRID_D, max(H, W), max(H, W)).eval(), torch.randn(2, 4, GRID_D)
    tables = {"row": library.row_embedder.weight, "column": library.column_embedder.weight}
    module.load_state_dict({f"axes.tables.{axis}": table for axis, table in tables.items()})
    ids = torch.tensor([[[0, 4], [2, 0], [2, 4], [1, 3]], [[4, 4], [0, 0], [3, 1], [3, 1]]])
    found, expected = module(library.patch_projection(patches), ids), library(torch.cat((ids, patches), dim=-1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_learned_grid_looks_up_cell_by_row_and_column() -> None:
    module, ids = LearnedGridEncoding(GRID_D, H, W), torch.tensor([[[2, 4], [0, 3], [1, 0]]])
    oracle = nn.Embedding(H * W, GRID_D, _weight=module.weight)
    assert torch.equal(module(NO_PATCHES[:, :3], ids), oracle(torch.tensor([[14, 3, 5]])))
    assert torch.equal(module(NO_PATCHES)[0], module.weight)


@GRID_KINDS
def test_grid_accepts_any_cells_in_any_order(kind: type[Grid]) -> None:
    module, x = kind(GRID_D, H, W).eval(), torch.randn(2, H * W, GRID_D)
    whole = module(NO_PATCHES)[0]
    orders = torch.stack([torch.randperm(H * W) for _ in range(2)])
    assert torch.equal(module(x, grid_ids(H, W)[0, orders]), x + whole[orders])
    corner = whole.reshape(H, W, GRID_D)[:2, :3].flatten(0, 1)
    assert torch.equal(module(x[:, :6], grid_ids(2, 3)), x[:, :6] + corner)


@GRID_KINDS
def test_invalid_grid_positions_are_rejected(kind: type[Grid]) -> None:
    module = kind(GRID_D, H, W)
    for length in (1, H * W - 1, H * W + 1):
        message = f"x: got {length} patches, expected 15 (a grid of 3 x 5)"
        assert message in rejection(ValueError, module, torch.randn(2, length, GRID_D))
    for shape in ((1, 4), (1, 4, 1), (3, 4, 2), (1, 5, 2)):
        message = f"position_ids: got shape {shape}, expected (1, 4, 2) or (2, 4, 2)"
        assert (
            rejection(ValueError, module, torch.randn(2, 4, GRID_D), torch.zeros(shape, dtype=torch.int64)) == message
        )
    cells = [([0, -1], "got -1, expected 0")]
    if kind is not SinusoidalGridEncoding:
        cells += [([H, 0], "row got 3, expected 0 to 2"), ([0, W], "column got 5, expected 0 to 4")]
    for cell, message in cells:
        assert message in rejection(ValueError, module, torch.randn(1, 1, GRID_D), torch.tensor([[cell]])), cell


DERIVED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "alibi": (lambda: AlibiBias(12), lambda module: module(0, 9, 9)),
    "relative sinusoid": (lambda: RelativeSinusoid(8), lambda module: module(2, 3000)),
    "rotary": (lambda: RotaryEmbedding(CONFIGS["llama3"]), lambda module: torch.stack(module(IDS, offset=10_000))),
    "sinusoid": (lambda: Sinusoid(64), lambda module: module(torch.tensor([3, 10**6]))),
}


def test_derived_values_are_no_state_and_stay_float32() -> None:
    for name, (build, call) in DERIVED.items():
        module, expected = build(), call(build())
        assert (list(module.parameters()), module.state_dict()) == ([], {}), name
        for dtype in (torch.bfloat16, torch.float64):
            assert torch.equal(call(build().to(dtype)), expected), name
        module.to("meta")
        assert {buffer.device.type for buffer in module.buffers()} <= {"meta"}, name
        assert torch.equal(call(module.to_empty(device="cpu")), expected), name


def test_derived_tables_have_values_after_to_empty() -> None:
    cells = Positions(table="exact", rows=6, grid=(2, 3))
    tables = Tokens(rows=9, width=4), cells
    grid = FrontEnd(FrontEndConfig(family="grid", steps=tables, max_len=6, ngrams=NGRAMS))
    for module in (SinusoidalPositionalEncoding(64, 5000), grid):
        expected = {name: buffer.clone() for name, buffer in module.named_buffers()}
        assert expected
        module.bfloat16().float().to("meta").to_empty(device="cpu")
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, expected[name]), name


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch gives it on Python 3.13.0 alone
def test_compiled_module_checks_and_computes_as_before() -> None:
    grid, x = LearnedGridEncoding(GRID_D, H, W, dropout=0.0), torch.zeros(1, 1, GRID_D)
    compiled = torch.compile(grid, backend="eager")
    assert "column got 5, expected 0 to 4" in rejection(ValueError, compiled, x, torch.tensor([[[0, W]]]))
    for module in (RotaryEmbedding(CONFIGS["llama3"]), SinusoidalPositionalEncoding(D, M, dropout=0.0)):
        found, expected = torch.compile(module, backend="eager")(NO_IDS, offset=10_000), module(NO_IDS, offset=10_000)
        assert torch.equal(torch.stack([*found]), torch.stack([*expected]))
    stem = PatchStem(PatchConfig(family="vit", width=4, channels=1, image_size=4, patch_size=2)).bfloat16()
    image = torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(stem, backend="eager")(image), stem(image))


def test_rotary_and_sinusoids_are_built_on_meta_with_values() -> None:
    for name in ("rotary", "sinusoid"):
        build, call = DERIVED[name]
        with torch.device("meta"):
            module = build()
        assert torch.equal(call(module), call(build())), name
