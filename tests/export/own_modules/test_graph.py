"""Custom modules with reshaped positions: their graphs take an offset for each row. Oracle: the module itself."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from preblock.export import export_module
from preblock.export.errors import ExportError
from preblock.service.runtime.session import Session

V, D, M = 30, 8, 50
Places = Callable[[Tensor, Tensor], Tensor]


class Reshaped(nn.Module):
    """The sum of tokens and of `places`, a function of positions (1 or B, L) and a table (M, D)."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.table, self.places = nn.Embedding(V, D), nn.Embedding(M, D), places

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        positions = offset[:, None] + torch.arange(input_ids.shape[1])
        vectors: Tensor = self.tokens(input_ids) + self.places(positions, self.table.weight)
        return vectors


def angles(positions: Tensor) -> Tensor:
    return positions.float().unsqueeze(-1) * torch.exp(torch.arange(0, D, 2) * (-math.log(10000) / D))


def stack_and_flatten(positions: Tensor, _: Tensor) -> Tensor:
    return torch.stack((angles(positions).sin(), angles(positions).cos()), -1).flatten(-2)


def assign_slices(positions: Tensor, _: Tensor) -> Tensor:
    found = torch.zeros(*positions.shape, D)
    found[..., 0::2], found[..., 1::2] = angles(positions).sin(), angles(positions).cos()
    return found


def look_up_flat(positions: Tensor, table: Tensor) -> Tensor:
    return nn.functional.embedding(positions.reshape(-1), table).view(*positions.shape, -1)


@pytest.mark.parametrize("places", [stack_and_flatten, assign_slices, look_up_flat])
def test_reshaped_positions_take_offset_for_each_row(places: Places, tmp_path: Path) -> None:
    module = Reshaped(places).eval()
    exported = export_module(module, "reshaped", tmp_path, vocab_size=V, max_len=M)
    session, ids = Session(exported.folder), np.array([[1, 2, 3], [4, 5, 6], [0, 7, V - 1]])
    for offset in ([0, M - 3, 9], [4]):
        found = session.run({"input_ids": ids, "offset": np.array(offset)})["embeddings"]
        with torch.inference_mode():
            expected = module(torch.from_numpy(ids), torch.tensor(offset)).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_graph_that_onnx_rejects_is_not_published(tmp_path: Path) -> None:
    class Mixed(Reshaped):
        def __init__(self) -> None:
            super().__init__(look_up_flat)
            self.norm = nn.LayerNorm(D)

        def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                vectors: Tensor = self.norm(super().forward(input_ids, offset).bfloat16()).float()
            return vectors

    with pytest.raises(ExportError, match=r"^model\.onnx: ONNX rejects the graph: "):
        export_module(Mixed(), "mixed", tmp_path, vocab_size=V, max_len=M)
    assert list(tmp_path.iterdir()) == []
