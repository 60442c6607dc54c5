"""Modules whose vectors depend on other tokens, or on the place of a row in its batch."""

import pytest
import torch
from torch import Tensor, nn

from preblock.models.custom_frontend import CustomFrontEnd


class Distant(nn.Embedding):
    """Adds the vectors eight places before."""

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:  # type: ignore[override] # noqa: ARG002
        vectors = super().forward(input_ids)
        return vectors + nn.functional.pad(vectors, (0, 0, 8, 0))[:, : vectors.shape[1]]


class Numbered(nn.Embedding):
    """Adds the number of the row in its batch."""

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:  # type: ignore[override] # noqa: ARG002
        return super().forward(input_ids) + torch.arange(len(input_ids)).reshape(-1, 1, 1)


@pytest.mark.parametrize("kind", [Distant, Numbered])
def test_module_that_mixes_is_rejected(kind: type[nn.Embedding]) -> None:
    with pytest.raises(ValueError, match=r"^module: got vectors in two rows of 20 tokens that differ by"):
        CustomFrontEnd(kind(7, 4).eval(), vocab_size=7, max_len=20)
