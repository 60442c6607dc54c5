"""Normalisation by the root mean square. Oracle: torch's own."""

import pytest
import torch
from torch import nn

from preblock.models.modules.root_mean_square_norm import RootMeanSquareNorm


@pytest.mark.parametrize("weighted", [True, False])
def test_norm_equals_that_of_torch(weighted: bool) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(2, 3, 8)
    norm, oracle = RootMeanSquareNorm(8, 1e-3, weighted), nn.RMSNorm(8, 1e-3, weighted)
    torch.testing.assert_close(norm(vectors), oracle(vectors))


def test_repr_states_width_and_eps() -> None:
    assert repr(RootMeanSquareNorm(8)) == "RootMeanSquareNorm(8, eps=1e-06)"
    assert repr(RootMeanSquareNorm(8, weighted=False)) == "RootMeanSquareNorm(eps=1e-06)"
