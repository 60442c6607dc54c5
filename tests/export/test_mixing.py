"""Modules whose vectors depend on other tokens, on the place of a row in its batch, or on chance."""

import pytest
import torch
from torch import Tensor, nn

from preblock.models.custom_frontend import COMPARED_IDS, CustomFrontEnd


class Summed(nn.Embedding):
    """Token vectors and further ones."""

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:  # type: ignore[override] # noqa: ARG002
        vectors = super().forward(input_ids)
        return vectors + self.further(input_ids, vectors)

    def further(self, input_ids: Tensor, vectors: Tensor) -> Tensor:
        raise NotImplementedError


class Distant(Summed):
    """Adds the vectors eight places before."""

    def further(self, input_ids: Tensor, vectors: Tensor) -> Tensor:
        return nn.functional.pad(vectors, (0, 0, 8, 0))[:, : input_ids.shape[1]]


class Far(Summed):
    """Adds the first vector of the row to those from place 80 on."""

    def further(self, input_ids: Tensor, vectors: Tensor) -> Tensor:
        return (torch.arange(input_ids.shape[1]) >= 80).reshape(1, -1, 1) * vectors[:, :1]


class Numbered(Summed):
    """Adds the number of the row in its batch."""

    def further(self, input_ids: Tensor, vectors: Tensor) -> Tensor:  # noqa: ARG002
        return torch.arange(len(input_ids)).reshape(-1, 1, 1)


class Centred(Summed):
    """Subtracts half of the mean of all rows."""

    def further(self, input_ids: Tensor, vectors: Tensor) -> Tensor:  # noqa: ARG002
        return vectors.mean(0, keepdim=True) / -2


@pytest.mark.parametrize("kind", [Distant, Numbered, Centred])
def test_module_that_mixes_is_rejected(kind: type[nn.Embedding]) -> None:
    with pytest.raises(ValueError, match=r"^module: got a vector at position \d+ of a row of 20 tokens that"):
        CustomFrontEnd(kind(7, 4).eval(), vocab_size=7, max_len=20)


def test_module_that_mixes_distant_tokens_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"at position (8|9)\d of a row of 100 tokens that differs by"):
        CustomFrontEnd(Far(7, 4).eval(), vocab_size=7, max_len=100)


class Padded(nn.Embedding):
    """Counts only ids other than `padding` as positions."""

    padding: int

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:  # type: ignore[override]
        real = input_ids.ne(self.padding)
        return super().forward(input_ids) + (offset.unsqueeze(1) + real.cumsum(1)).unsqueeze(-1)


@pytest.mark.parametrize("vocab_size", [500, 2 * COMPARED_IDS])
@pytest.mark.parametrize("max_len", [2, 40, 1000])
def test_module_with_padding_at_any_id_is_rejected(vocab_size: int, max_len: int) -> None:
    module = Padded(vocab_size, 2).eval()
    for module.padding in (0, 39, 499, vocab_size - 1):
        with pytest.raises(ValueError, match=r"^module: got a vector at position \d+ of a row of"):
            CustomFrontEnd(module, vocab_size, max_len)
    module.padding = -1
    CustomFrontEnd(module, vocab_size, max_len)


class Dropped(Summed):
    def further(self, input_ids: Tensor, vectors: Tensor) -> Tensor:  # noqa: ARG002
        return nn.functional.dropout(vectors, 0.1)


def test_module_with_dropout_in_forward_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^module: got other vectors in a second call .*; is there dropout"):
        CustomFrontEnd(Dropped(7, 4).eval(), vocab_size=7, max_len=20)


class FirstOffset(nn.Embedding):
    """Gives every row the positions of the first one."""

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids) + self.positions(input_ids.shape[1], offset).unsqueeze(-1)

    def positions(self, length: int, offset: Tensor) -> Tensor:
        return offset[0] + torch.arange(length)


class OneNumber(FirstOffset):
    def positions(self, length: int, offset: Tensor) -> Tensor:
        return offset.item() + torch.arange(length)


class Flat(FirstOffset):
    def positions(self, length: int, offset: Tensor) -> Tensor:
        return offset + torch.arange(length)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (FirstOffset, "got vectors that .*, expected each row at its own offset"),
        (OneNumber, "the module fails for 40 rows, each at its own offset: RuntimeError: .*; annotate the second"),
        (Flat, r"got .* for ids \(40, 1\) and offsets \(40,\), expected"),
    ],
)
def test_module_with_one_offset_for_all_rows_is_rejected(kind: type[FirstOffset], message: str) -> None:
    with pytest.raises(ValueError, match=f"^module: {message}"):
        CustomFrontEnd(kind(7, 4).eval(), vocab_size=7, max_len=20)
