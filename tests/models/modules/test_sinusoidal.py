"""Sinusoidal positions: their values, their table and what lies beyond it."""

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

from preblock.models.modules.positions import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from preblock.models.modules.sinusoids import sinusoid


def exact(positions: list[int], d_model: int, base: int = 10000) -> NDArray[np.float64]:
    """The formula of the paper in 40 decimal digits."""
    with mpmath.workdps(40):
        angles = [
            [position / mpmath.power(base, mpmath.mpf(2 * i) / d_model) for i in range(d_model // 2)]
            for position in positions
        ]
        values = [[f(angle) for angle in row for f in (mpmath.sin, mpmath.cos)] for row in angles]
        return np.array(values, dtype=np.float64)


def vectors(module: SinusoidalPositionalEncoding, positions: list[int]) -> NDArray[np.float32]:
    ids = torch.zeros((1, len(positions)), dtype=torch.int64)
    found: NDArray[np.float32] = module(ids, position_ids=torch.tensor([positions]))[0].numpy()
    return found


@pytest.mark.parametrize("base", [10000, 500])
def test_sinusoid_table_is_within_one_unit_of_mpmath(base: int) -> None:
    positions = [0, 1, 2, 3, 100, *range(511, 4096, 117), 4095]
    expected = exact(positions, 32, base)
    found = vectors(SinusoidalPositionalEncoding(32, 4096, base=base), positions)
    assert (np.abs(found - expected) <= np.spacing(np.abs(expected).astype(np.float32))).all()


def test_far_sinusoids_equal_mpmath_unlike_float32_products() -> None:
    positions = [10**6 - 1, 10**6, 10**6 + 12345]
    expected = exact(positions, 64)
    assert np.abs(vectors(SinusoidalPositionalEncoding(64, 16), positions) - expected).max() <= 1e-7
    frequency = np.float32(10000.0) ** (-np.arange(0, 64, 2, dtype=np.float32) / np.float32(64))
    naive = np.sin(np.array(positions, np.float32)[:, None] * frequency)
    assert np.abs(naive - expected[:, 0::2]).max() > 1e-2


def test_sinusoids_beyond_float32_integers_equal_mpmath() -> None:
    positions = [2**24, 2**24 + 1, 10**9, 10**9 + 1]
    assert np.abs(vectors(SinusoidalPositionalEncoding(16, 16), positions) - exact(positions, 16)).max() <= 1e-6


def test_sinusoid_table_equals_transformers_distilbert() -> None:
    expected = create_sinusoidal_embeddings(512, 48, torch.empty(512, 48))
    assert torch.allclose(SinusoidalPositionalEncoding(48, 512).table, expected, rtol=0, atol=6e-8)


def test_positions_beyond_table_equal_larger_table() -> None:
    ids = torch.zeros((2, 20), dtype=torch.int64)
    offset = torch.tensor([0, 90])
    assert torch.equal(
        SinusoidalPositionalEncoding(8, 7)(ids, offset=offset), SinusoidalPositionalEncoding(8, 110)(ids, offset=offset)
    )


def test_sinusoid_rotation_by_k_shifts_position_by_k() -> None:
    d_model, count = 16, 300
    table = SinusoidalPositionalEncoding(d_model, 2 * count).table.double().numpy()
    frequency = 10000.0 ** (-np.arange(0, d_model, 2) / d_model)
    for k in range(count):
        rotation = np.zeros((d_model, d_model))
        for i, angle in enumerate(frequency * k):
            rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [
                [np.cos(angle), -np.sin(angle)],
                [np.sin(angle), np.cos(angle)],
            ]
        assert np.abs(table[:count] @ rotation - table[k : k + count]).max() < 3e-7, k


def test_sinusoidal_encoding_has_no_parameters_or_state() -> None:
    module = SinusoidalPositionalEncoding(8, 16)
    assert list(module.parameters()) == []
    assert module.state_dict() == {}


def test_sinusoid_table_follows_module_device_and_dtype() -> None:
    module = SinusoidalPositionalEncoding(8, 16)
    assert module.to("meta").table.device.type == "meta"
    assert SinusoidalPositionalEncoding(8, 16).to(torch.bfloat16).table.dtype == torch.bfloat16


def test_dtype_of_module_holds_beyond_table() -> None:
    module, x = SinusoidalPositionalEncoding(8, 4).to(torch.bfloat16), torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    assert module(x).dtype == module(x, offset=100).dtype == torch.bfloat16


def test_sinusoidal_encoding_can_replace_learned_encoding() -> None:
    x, position_ids = torch.randn(2, 3, 8), torch.tensor([[4, 0, 2]])
    for kind in (LearnedPositionalEncoding, SinusoidalPositionalEncoding):
        module = kind(8, 16, 0.0)
        assert module(x, position_ids).shape == module(x, None, 5).shape == x.shape


def test_odd_width_is_rejected() -> None:
    with pytest.raises(ValueError, match="d_model: got 7, expected an even width"):
        SinusoidalPositionalEncoding(7, 16)


@pytest.mark.parametrize("d_model", [1, 7])
def test_odd_width_is_zero_padded_on_request(d_model: int) -> None:
    positions = [0, 1, 15, 200]
    found = vectors(SinusoidalPositionalEncoding(d_model, 16, pad_odd=True), positions)
    assert found.shape == (4, d_model)
    assert (found[:, -1] == 0).all()
    assert np.allclose(found[:, :-1], exact(positions, d_model).reshape(4, d_model - 1), rtol=0, atol=1e-7)


def test_positions_of_any_shape_are_computed() -> None:
    positions = torch.tensor([[3, 1], [4, 1]])
    assert torch.equal(sinusoid(positions, 8), SinusoidalPositionalEncoding(8, 5).table[positions])
