"""Position modules: the arguments that both share, and the learned table."""

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from preblock.models.modules.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding

Module = LearnedPositionalEncoding | SinusoidalPositionalEncoding
KINDS = pytest.mark.parametrize("kind", [LearnedPositionalEncoding, SinusoidalPositionalEncoding])

D, M = 6, 10


def rows(module: Module, positions: list[int]) -> Tensor:
    """The vectors of single positions, one by one."""
    ids = torch.zeros((1, 1), dtype=torch.int64)
    return torch.cat([module(ids, position_ids=torch.tensor([[position]])) for position in positions], dim=1)


@KINDS
def test_position_module_adds_vectors_to_float_input(kind: type[Module]) -> None:
    module, x = kind(D, M).eval(), torch.randn(2, 4, D)
    assert torch.equal(module(x), x + rows(module, [0, 1, 2, 3]))


@KINDS
def test_position_module_returns_only_vectors_for_ids(kind: type[Module]) -> None:
    module = kind(D, M).eval()
    assert torch.equal(module(torch.zeros((2, 4), dtype=torch.int64)), rows(module, [0, 1, 2, 3]))


@KINDS
@pytest.mark.parametrize("offset", [3, torch.tensor([3])], ids=["int", "tensor"])
def test_scalar_offset_shifts_every_row(kind: type[Module], offset: int | Tensor) -> None:
    module, x = kind(D, M).eval(), torch.randn(2, 4, D)
    assert torch.equal(module(x, offset=offset), x + rows(module, [3, 4, 5, 6]))


@KINDS
def test_per_row_offset_shifts_each_row(kind: type[Module]) -> None:
    module, x = kind(D, M).eval(), torch.randn(3, 2, D)
    expected = x + torch.cat([rows(module, [0, 1]), rows(module, [8, 9]), rows(module, [3, 4])])
    assert torch.equal(module(x, offset=torch.tensor([0, 8, 3])), expected)


@KINDS
def test_stepwise_positions_equal_single_pass(kind: type[Module]) -> None:
    module, x = kind(D, M).eval(), torch.randn(2, M, D)
    steps = [module(x[:, start : start + 3], offset=start) for start in range(0, M, 3)]
    assert torch.equal(torch.cat(steps, dim=1), module(x))


@KINDS
@pytest.mark.parametrize("ids", [[[7, 0, 3]], [[7, 0, 3], [9, 9, 1]]], ids=["for all rows", "per row"])
def test_position_ids_may_be_non_consecutive(kind: type[Module], ids: list[list[int]]) -> None:
    module, x = kind(D, M).eval(), torch.randn(2, 3, D)
    expected = x + torch.cat([rows(module, row) for row in ids])
    assert torch.equal(module(x, position_ids=torch.tensor(ids)), expected)


@KINDS
def test_empty_sequence_at_max_len_is_accepted(kind: type[Module]) -> None:
    assert kind(D, M).eval()(torch.randn(2, 0, D), offset=M).shape == (2, 0, D)


@KINDS
def test_empty_batch_is_accepted(kind: type[Module]) -> None:
    module, x = kind(D, M).eval(), torch.randn(0, 3, D)
    assert module(x).shape == (0, 3, D)
    assert module(x, offset=torch.zeros(0, dtype=torch.int64)).shape == (0, 3, D)


@KINDS
@pytest.mark.parametrize("offset", [-1, torch.tensor([-1]), torch.tensor([2, -1])])
def test_negative_offset_is_rejected(kind: type[Module], offset: int | Tensor) -> None:
    with pytest.raises(ValueError, match="offset: got -1, expected 0 or more"):
        kind(D, M)(torch.randn(2, 4, D), offset=offset)


@KINDS
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2), (2, 1, 1)])
def test_offset_with_wrong_shape_is_rejected(kind: type[Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="offset: got shape"):
        kind(D, M)(torch.randn(1, 4, D), offset=torch.zeros(shape, dtype=torch.int64))


@KINDS
def test_negative_position_id_is_rejected(kind: type[Module]) -> None:
    with pytest.raises(ValueError, match="position_ids: got -2, expected 0 or more"):
        kind(D, M)(torch.randn(1, 2, D), position_ids=torch.tensor([[1, -2]]))


@KINDS
@pytest.mark.parametrize("offset", [1, torch.tensor([0])], ids=["int", "tensor"])
def test_position_ids_with_offset_are_rejected(kind: type[Module], offset: int | Tensor) -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        kind(D, M)(torch.randn(1, 2, D), position_ids=torch.tensor([[0, 1]]), offset=offset)


@KINDS
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3), (1, 2, 4)])
def test_position_ids_with_wrong_shape_are_rejected(kind: type[Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"position_ids: got shape .*expected \(1, 4\) or \(2, 4\)"):
        kind(D, M)(torch.randn(2, 4, D), position_ids=torch.zeros(shape, dtype=torch.int64))


@KINDS
def test_dropout_applies_after_sum_only_in_training(kind: type[Module]) -> None:
    torch.manual_seed(0)
    module, x = kind(64, 50, dropout=0.5), torch.randn(8, 50, 64)
    expected = x + rows(module, list(range(50)))
    found = module.train()(x)
    kept = found != 0
    assert torch.equal(found[kept], (expected * 2)[kept])
    assert 0.48 < kept.float().mean() < 0.52
    assert torch.equal(module.eval()(x), expected)


def test_position_modules_share_one_call_signature() -> None:
    assert inspect.signature(LearnedPositionalEncoding.forward) == inspect.signature(
        SinusoidalPositionalEncoding.forward
    )
    learned, sinusoidal = (
        inspect.signature(kind).parameters for kind in (LearnedPositionalEncoding, SinusoidalPositionalEncoding)
    )
    own = {"init", "std"}
    assert {name: learned[name] for name in learned if name not in own} == {
        name: sinusoidal[name] for name in learned if name not in own
    }


def test_learned_positions_equal_torch_embedding() -> None:
    module, x = LearnedPositionalEncoding(D, M, dropout=0.0), torch.randn(2, 4, D)
    oracle = nn.Embedding(M, D, _weight=module.weight)
    assert torch.equal(module(x, offset=5), x + oracle(torch.arange(5, 9)))


@pytest.mark.parametrize(("length", "offset"), [(M, 0), (1, M - 1), (4, M - 4)])
def test_length_up_to_max_len_is_accepted(length: int, offset: int) -> None:
    module, x = LearnedPositionalEncoding(D, M).eval(), torch.randn(1, length, D)
    assert torch.equal(module(x, offset=offset), x + module.weight[offset:])


@pytest.mark.parametrize(
    ("length", "offset", "named"),
    [(M + 1, 0, 0), (1, M, M), (4, M - 3, M - 3), (4, torch.tensor([0, M - 3]), M - 3), (1, 2**62, 2**62)],
)
def test_length_beyond_max_len_is_rejected(length: int, offset: int | Tensor, named: int) -> None:
    with pytest.raises(ValueError, match=rf"length {length} \+ offset {named} = \d+ exceeds the maximum length {M}"):
        LearnedPositionalEncoding(D, M)(torch.randn(2, length, D), offset=offset)


def test_position_id_beyond_table_is_rejected() -> None:
    with pytest.raises(ValueError, match="position_ids: got 10, expected 0 to 9"):
        LearnedPositionalEncoding(D, M)(torch.randn(1, 2, D), position_ids=torch.tensor([[0, M]]))


@pytest.mark.parametrize(
    ("max_len", "d_model", "parameters"),
    [(512, 768, 393_216), (2048, 768, 1_572_864), (2048, 1024, 2_097_152), (8192, 1024, 8_388_608)],
)
def test_learned_table_has_published_parameter_count(max_len: int, d_model: int, parameters: int) -> None:
    assert (
        sum(parameter.numel() for parameter in LearnedPositionalEncoding(d_model, max_len).parameters()) == parameters
    )


def test_learned_table_starts_normally_distributed() -> None:
    torch.manual_seed(0)
    table = LearnedPositionalEncoding(256, 512).weight.detach().double().numpy()
    assert abs(table.mean()) < 2e-4
    assert abs(table.std() - 0.02) < 2e-4
    # Of a normal distribution 95.45 % lies within two standard deviations.
    assert abs(np.mean(np.abs(table) < 0.04) - 0.9545) < 2e-3


def test_unused_table_rows_get_no_gradient() -> None:
    module, x = LearnedPositionalEncoding(D, M, dropout=0.0), torch.randn(3, 2, D, requires_grad=True)
    module(x, offset=torch.tensor([0, 1, 1])).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad[:, 0].tolist() == [1, 3, 2, *[0] * (M - 3)]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_training_fits_learned_table_to_target() -> None:
    torch.manual_seed(0)
    module, target = LearnedPositionalEncoding(D, M, dropout=0.0), torch.randn(1, M, D)
    optimizer = torch.optim.SGD(module.parameters(), lr=10.0)
    for _ in range(50):
        optimizer.zero_grad()
        functional.mse_loss(module(torch.zeros(1, M, D)), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert torch.allclose(module.weight, target[0], atol=1e-3)
