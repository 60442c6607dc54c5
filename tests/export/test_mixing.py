"""Modules whose vectors depend on other tokens, on the place of a row in its batch, or on chance."""

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from preblock.models.custom_frontend import COMPARED_IDS, CustomFrontEnd
from tests.models.rejections import rejection

Further = Callable[[nn.Embedding, Tensor, Tensor], Tensor]


class Summed(nn.Embedding):
    """Token vectors and further ones: a function of the module, of ids and of offsets."""

    def __init__(self, further: Further, vocab_size: int = 7) -> None:
        super().__init__(vocab_size, 4)
        self.further = further

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids) + self.further(self, input_ids, offset)

    def vectors(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def places(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1])


MIXED = r"got a vector at position \d+ of a row of 20 tokens that"
WRONG: list[tuple[str, Further, int, str]] = [
    ("eight before", lambda module, ids, _: nn.functional.pad(module.vectors(ids), (0, 0, 8, 0))[:, :-8], 20, MIXED),
    (
        "first token, from place 80 on",
        lambda module, ids, _: (places(ids) >= 80).reshape(1, -1, 1) * module.vectors(ids)[:, :1],
        100,
        r"got a vector at position (8|9)\d of a row of 100 tokens that differs by",
    ),
    ("number of the row", lambda _, ids, __: torch.arange(len(ids)).reshape(-1, 1, 1), 20, MIXED),
    ("mean of all rows", lambda module, ids, _: module.vectors(ids).mean(0, keepdim=True) / -2, 20, MIXED),
    ("no offset", lambda _, ids, __: places(ids).reshape(-1, 1), 20, "position; does forward add its second argument"),
    (
        "dropout",
        lambda module, ids, _: nn.functional.dropout(module.vectors(ids), 0.1),
        20,
        "got other vectors in a second call .*; is there dropout",
    ),
    (
        "offset of the first row",
        lambda _, ids, offset: (offset[0] + places(ids)).unsqueeze(-1),
        20,
        "got vectors that .*, expected each row at its own offset",
    ),
    (
        "one number",
        lambda _, ids, offset: (offset.item() + places(ids)).unsqueeze(-1),
        20,
        "the module fails for 40 rows, each at its own offset: RuntimeError: .*; annotate the second",
    ),
    (
        "flat offsets",
        lambda _, ids, offset: (offset + places(ids)).unsqueeze(-1),
        20,
        r"got .* for ids \(40, 1\) and offsets \(40,\), expected",
    ),
]


def test_module_that_mixes_tokens_or_rows_is_rejected() -> None:
    for name, further, max_len, message in WRONG:
        found = rejection(ValueError, CustomFrontEnd, Summed(further).eval(), vocab_size=7, max_len=max_len)
        assert re.search(f"^module: .*{message}", found), name


def test_module_with_padding_at_any_id_is_rejected() -> None:
    def count_real(_: nn.Embedding, ids: Tensor, offset: Tensor) -> Tensor:
        return (offset.unsqueeze(1) + ids.ne(padding).cumsum(1)).unsqueeze(-1)

    for vocab_size, max_len in ((500, 2), (500, 1000), (2 * COMPARED_IDS, 40)):
        module = Summed(count_real, vocab_size).eval()
        for padding in (0, 39, 499, vocab_size - 1):
            found = rejection(ValueError, CustomFrontEnd, module, vocab_size, max_len)
            assert re.search(r"^module: got a vector at position \d+ of a row of", found), padding
        padding = -1
        CustomFrontEnd(module, vocab_size, max_len)
