"""A module with one offset for all rows, in a graph with an offset for each. Oracle: its calls, row by row."""

import pytest
import torch
from torch import Tensor, nn

from preblock.models.custom_frontend import CustomFrontEnd

V, D, M = 7, 4, 6


class Numbered(nn.Module):
    """Tokens and positions, from one number on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(M, D)

    def forward(self, input_ids: Tensor, past_length: int) -> Tensor:
        places = self.places(torch.arange(past_length, past_length + input_ids.shape[1]))
        vectors: Tensor = self.tokens(input_ids) + places
        return vectors


@pytest.mark.parametrize("offset", [[0], [4], [0, 4, 1], [3, 3, 3]], ids=str)
def test_one_call_equals_a_call_for_each_offset(offset: list[int]) -> None:
    frontend = CustomFrontEnd(Numbered(), V, M)
    ids = torch.tensor([[1, 2], [6, 0], [3, 3]])
    with torch.inference_mode():
        assert torch.equal(frontend._traced(ids, torch.tensor(offset)), frontend(ids, torch.tensor(offset)))


def test_one_call_fails_beyond_the_last_position() -> None:
    frontend = CustomFrontEnd(Numbered(), V, M)
    with pytest.raises(IndexError):
        frontend._traced(torch.tensor([[1, 2], [1, 2]]), torch.tensor([0, M - 1]))
