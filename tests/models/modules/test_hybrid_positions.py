"""Hybrid positions: the learned table as torch's embedding reads it, and beyond it the sinusoids of transformers."""

import inspect

import pytest
import torch
from torch import Tensor, nn
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.initialisers import sinusoidal_
from preblock.models.modules.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding

D, M, FAR = 6, 10, 40
NO_IDS = torch.zeros((1, FAR), dtype=torch.int64)


def expected_rows(module: HybridPositionalEncoding) -> Tensor:
    """The vectors of the positions 0 to FAR - 1: (FAR, D)."""
    beyond = create_sinusoidal_embeddings(FAR, D, torch.empty(FAR, D))[M:]
    return torch.cat((nn.Embedding(M, D, _weight=module.weight)(torch.arange(M)), beyond))


def test_hybrid_positions_are_learned_then_sinusoidal() -> None:
    module = HybridPositionalEncoding(D, M)
    torch.testing.assert_close(module(NO_IDS)[0], expected_rows(module), rtol=0, atol=2e-7)


def test_hybrid_row_across_limit_uses_both_parts() -> None:
    module, x = HybridPositionalEncoding(D, M).eval(), torch.randn(2, 4, D)
    for start in range(M - 5, M + 2):
        expected = x + expected_rows(module)[start : start + 4]
        torch.testing.assert_close(module(x, offset=start), expected, rtol=0, atol=1e-6)


def test_hybrid_offset_per_row_selects_part_per_row() -> None:
    module, x = HybridPositionalEncoding(D, M).eval(), torch.randn(3, 2, D)
    rows = expected_rows(module)
    expected = x + torch.stack((rows[:2], rows[M - 1 : M + 1], rows[30:32]))
    torch.testing.assert_close(module(x, offset=torch.tensor([0, M - 1, 30])), expected, rtol=0, atol=1e-6)


def test_hybrid_position_ids_select_part_per_token() -> None:
    module, x = HybridPositionalEncoding(D, M).eval(), torch.randn(2, 4, D)
    ids = torch.tensor([[M, 0, 39, M - 1], [3, 12, 3, 12]])
    torch.testing.assert_close(module(x, ids), x + expected_rows(module)[ids], rtol=0, atol=1e-6)


def test_hybrid_learned_rows_do_not_depend_on_length() -> None:
    module = HybridPositionalEncoding(D, M)
    assert torch.equal(module(NO_IDS)[0, :M], module.weight)
    assert torch.equal(module(NO_IDS[:, :M])[0], module.weight)


def test_hybrid_steps_match_whole_sequence() -> None:
    module, x = HybridPositionalEncoding(D, M).eval(), torch.randn(2, 18, D)
    steps = [module(x[:, start : start + 3], offset=start) for start in range(0, 18, 3)]
    assert torch.equal(torch.cat(steps, dim=1), module(x))


def test_hybrid_sinusoidal_init_matches_sinusoidal_positions() -> None:
    module = HybridPositionalEncoding(D, M, base=500.0)
    sinusoidal_(module.weight, base=500.0)
    assert torch.equal(module(NO_IDS), SinusoidalPositionalEncoding(D, M, base=500.0)(NO_IDS))


def test_hybrid_far_positions_match_sinusoids() -> None:
    module, ids = HybridPositionalEncoding(D, M), torch.tensor([[10**6, 10**9]])
    assert torch.equal(module(NO_IDS[:, :2], ids), SinusoidalPositionalEncoding(D, M)(NO_IDS[:, :2], ids))


def test_only_used_hybrid_rows_have_gradient() -> None:
    module, x = HybridPositionalEncoding(D, M, dropout=0.0), torch.randn(1, 4, D, requires_grad=True)
    module(x, offset=M - 1).sum().backward()
    assert module.weight.grad is not None
    # The three positions beyond the table leave its last row alone, which one position uses.
    assert module.weight.grad[:, 0].tolist() == [*[0] * (M - 1), 1]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_hybrid_state_holds_only_table() -> None:
    assert list(HybridPositionalEncoding(D, M).state_dict()) == ["weight"]
    assert sum(parameter.numel() for parameter in HybridPositionalEncoding(D, M).parameters()) == D * M


def test_hybrid_accepts_zero_tokens() -> None:
    assert HybridPositionalEncoding(D, M).eval()(torch.randn(2, 0, D), offset=M).shape == (2, 0, D)


@pytest.mark.parametrize("offset", [0, M - 1, M], ids=["below", "across", "beyond"])
def test_hybrid_output_keeps_module_dtype_on_both_sides(offset: int) -> None:
    x = torch.zeros(1, 4, D, dtype=torch.bfloat16)
    assert HybridPositionalEncoding(D, M).to(torch.bfloat16)(x, offset=offset).dtype == torch.bfloat16


def test_hybrid_dropout_applies_after_sum_only_in_training() -> None:
    torch.manual_seed(0)
    module, x = HybridPositionalEncoding(64, 30, dropout=0.5), torch.randn(8, 50, 64)
    expected = module.eval()(x)
    found = module.train()(x)
    kept = found != 0
    assert torch.equal(found[kept], (expected * 2)[kept])
    assert 0.48 < kept.float().mean() < 0.52


def test_hybrid_signatures_match_other_encodings() -> None:
    assert inspect.signature(HybridPositionalEncoding.forward) == inspect.signature(LearnedPositionalEncoding.forward)
    found, expected = (
        dict(inspect.signature(kind).parameters) for kind in (HybridPositionalEncoding, SinusoidalPositionalEncoding)
    )
    assert {name: found[name] for name in expected} == expected
    assert set(found) - set(expected) == {"init", "std"}


@pytest.mark.parametrize(
    ("ids", "offset", "message"),
    [
        (None, -1, "offset: got -1, expected 0 or more"),
        (None, torch.zeros(3, dtype=torch.int64), r"offset: got shape \(3,\), expected \(1,\) or \(2,\)"),
        (torch.tensor([[0, -7, 99]]), 0, "position_ids: got -7, expected 0 or more"),
        (torch.tensor([[0, 1]]), 0, r"position_ids: got shape \(1, 2\), expected \(1, 3\) or \(2, 3\)"),
        (torch.tensor([[0, 1, 2]]), 5, "exclude each other"),
    ],
)
def test_invalid_hybrid_positions_are_rejected(ids: Tensor | None, offset: int | Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridPositionalEncoding(D, M)(torch.randn(2, 3, D), ids, offset)


def test_hybrid_with_odd_width_is_rejected() -> None:
    with pytest.raises(ValueError, match="d_model: got 7, expected an even width"):
        HybridPositionalEncoding(7, M)


def test_hybrid_with_pad_odd_pads_sinusoids_with_zeros() -> None:
    found = HybridPositionalEncoding(7, M, pad_odd=True)(NO_IDS)[0]
    assert (found[M:, -1] == 0).all()
    assert (found[:M, -1] != 0).all()


def test_hybrid_without_rows_is_rejected() -> None:
    with pytest.raises(ValueError, match="max_len: got 0, expected 1 or more"):
        HybridPositionalEncoding(D, 0)
