"""A user's own modules: exported by one call, proven and served like any other, or rejected."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from preblock.export import export_module
from preblock.export.errors import ExportError
from preblock.export.verification import verify
from preblock.models import BertEmbeddings
from preblock.models.custom_frontend import COMPARED_IDS, CustomFrontEnd
from preblock.models.modules.stems import PatchConfig, PatchStem
from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.auth import SERVICE
from preblock.service.core.types import TokenRequest, TokenRows
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from preblock.service.runtime.session import Session
from tests.clients.client_matrix import check_standard
from tests.models.rejections import rejection
from tests.support.engines import ask_engine, open_engine

V, D, M = 13, 6, 9
LONG = 512
"""Number of positions; the table is in the data file even if narrow."""


class Mine(nn.Module):
    """Tokens and positions side by side, mixed: no row of the family table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(M, D)
        self.mix = nn.Linear(2 * D, D)

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1]) + offset.unsqueeze(1)
        places = self.places(positions).expand(input_ids.shape[0], -1, -1)
        vectors: Tensor = self.mix(torch.cat((self.tokens(input_ids), places), dim=-1)).tanh()
        return vectors


class Sum(nn.Module):
    """The sum of tokens and positions; either may be narrow enough to be broadcast."""

    def __init__(self, tokens: int, places: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.places = nn.Embedding(V, tokens), nn.Embedding(LONG, places)

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1]) + offset.unsqueeze(1)
        vectors: Tensor = self.tokens(input_ids) + self.places(positions)
        return vectors


@pytest.mark.parametrize(("tokens", "places", "kernel"), [(D, D, True), (D, 1, False), (1, D, False)])
def test_sum_has_kernel_only_without_broadcast_width(tmp_path: Path, tokens: int, places: int, kernel: bool) -> None:
    module = Sum(tokens, places)
    exported = export_module(module, "sum", tmp_path, vocab_size=V, max_len=LONG)
    assert isinstance(exported.manifest, Manifest)
    assert (exported.manifest.kernel is not None) == kernel
    (model,) = Repository(tmp_path).all(SERVICE)
    assert isinstance(model, TokenModel)
    ids = torch.tensor([[1, 2, 12]])
    feeds = {"input_ids": ids.numpy(), "offset": np.array([4])}
    expected = module(ids, torch.tensor([4])).detach().numpy()
    for _ in range(3):
        assert model.run(feeds, ("embeddings",))["embeddings"].tobytes() == expected.tobytes()


class Counted(nn.Module):
    """Takes the number of past tokens as an int, for all rows; `kind` is the way to read the positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.kind = nn.Embedding(V, D), nn.Embedding(M, D), kind

    def forward(self, input_ids: Tensor, past_length: int = 0) -> Tensor:
        length = input_ids.shape[1]
        if self.kind == "range":
            places = self.places(torch.arange(past_length, past_length + length))
        elif self.kind == "shift":
            places = self.places(torch.arange(length) + past_length)
        else:
            places = self.places.weight[past_length : past_length + length]
        vectors: Tensor = self.tokens(input_ids) + places
        return vectors


class CountedOrNone(Counted):
    def forward(self, input_ids: Tensor, past_length: int | None = 0) -> Tensor:
        assert past_length is not None
        return super().forward(input_ids, past_length)


@pytest.mark.parametrize("kind", ["range", "shift", "slice"])
def test_module_with_integer_offset_is_exported(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: the module, called once for each row."""
    module = (CountedOrNone if kind == "slice" else Counted)(kind)
    exported = export_module(module, "counted", str(tmp_path), vocab_size=V, max_len=M, exact=True)
    assert {"def", "Unable"}.isdisjoint(capfd.readouterr().err.split())  # of the graph and the warning of torch
    ids = np.array([[1, 2], [3, 12], [0, 5]])
    with open_engine(tmp_path) as engine:
        model = engine.repository.get("counted")
        for offset in ([0], [7], [0, 7, 3], [2, 2, 2]):
            request = TokenRequest(input_ids=TokenRows.of_array(ids), offset=np.array(offset))
            answer = asyncio.run(ask_engine(engine, model, request)).arrays["embeddings"]
            starts = offset * (3 // len(offset))
            rows = [module(torch.from_numpy(row[None]), start) for row, start in zip(ids, starts, strict=True)]
            assert answer.tobytes() == torch.cat(rows).detach().numpy().tobytes()
    check_standard(exported.folder)


class Ageless(nn.Module):
    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids.float().unsqueeze(-1)


class OneToken(Mine):
    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        if input_ids.shape[1] > 1:
            raise IndexError("one token only")
        return super().forward(input_ids, offset)


class FirstTokens(Mine):
    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        return super().forward(input_ids, offset)[:, :3]


class Bare(Mine):
    def forward(self, input_ids, past_length=0):  # type: ignore[no-untyped-def]
        return self.tokens(input_ids) + self.places(torch.arange(past_length, past_length + input_ids.shape[1]))


class Segments(nn.Module):
    def forward(self, input_ids: Tensor, token_type_ids: Tensor, offset: int = 0) -> Tensor:
        return nn.functional.one_hot(input_ids + token_type_ids + offset, V + M).float()


SIZES = {"vocab_size": V, "max_len": M}
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (Mine, SIZES, "module: got the class Mine, expected an instance of torch.nn.Module"),
    (torch.tanh, SIZES, "module: got a builtin_function_or_method, expected an instance of torch.nn.Module"),
    (Ageless(), SIZES, r"module: got forward\(input_ids.*, expected forward\(input_ids, off"),
    (Segments(), SIZES, "whose second argument would receive the offset, not token_type_ids; expected forward"),
    (Bare(), SIZES, "TypeError: .*; annotate the second argument as int if it takes one number"),
    (Mine(), {"max_len": M}, "vocab_size: got nothing, expected a number, because a Mine does not state it"),
    (Mine(), {"vocab_size": V}, "max_len: got nothing"),
    (Mine(), SIZES | {"vocab_size": 0}, "vocab_size: got 0, expected a whole number from 1 on"),
    (Mine(), SIZES | {"max_len": 9.0}, r"max_len: got 9\.0, expected a whole number"),
    (Mine(), SIZES | {"vocab_size": V + 1}, "vocab_size: the module fails for id 13 at position 0: IndexError"),
    (Mine(), SIZES | {"max_len": M + 1}, "max_len: the module fails for id 0 at position 9: IndexError"),
    (Mine().to("meta"), SIZES, "module: got vectors on the device meta, expected cpu"),
    (OneToken(), SIZES, "module: the module fails for 9 ids at position 0: IndexError: one token only"),
    (
        FirstTokens(),
        SIZES,
        rf"module: got torch\.float32 \(2, 3, {D}\) for ids \(2, 9\), expected torch\.float32 \(2, 9, D\)",
    ),
    (BertEmbeddings(V, D, M), {"max_len": M}, "max_len: got 9, expected nothing, because a .* has its own"),
    (BertEmbeddings(V, D, M), {"exact": True}, "exact: got True"),
    (
        BertEmbeddings(V, D, M).half(),
        {},
        r"tokens\.weight: got torch\.float16 on cpu, expected torch\.float32 on cpu; module\.float\(\)\.cpu\(\)",
    ),
    (BertEmbeddings(V, D, M).to("meta"), {}, r"tokens\.weight: got torch\.float32 on meta, expected"),
]


def test_wrong_arguments_for_module_are_rejected(tmp_path: Path) -> None:
    for module, arguments, message in WRONG:
        found = rejection(ExportError, export_module, module, "m", tmp_path, **arguments)
        assert re.search(message, found), (type(module), arguments)
    assert list(tmp_path.iterdir()) == []


def test_front_end_module_is_exported_with_description(tmp_path: Path) -> None:
    exported = export_module(BertEmbeddings(V, D, M), "trained", str(tmp_path))
    assert exported.manifest.front_end is not None
    assert verify(exported.folder).providers[CPU].outputs.keys() >= {"embeddings"}


class DoubledStem(PatchStem):
    """A stem with vectors that its config does not describe."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        return super().forward(pixel_values) * 2


def test_changed_stem_is_not_exported(tmp_path: Path) -> None:
    config = PatchConfig(family="vit", width=D, channels=1, image_size=4, patch_size=2)
    normed = PatchStem(config)
    normed.norm = nn.LayerNorm(D)
    for module, part in ((DoubledStem(config), "embeddings"), (normed, "weights")):
        with pytest.raises(ExportError, match=f"^module: got {part} unlike those of its config"):
            export_module(module, "m", tmp_path)


def test_module_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    module = Mine()
    module.number, module.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2, 0))
    module.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with torch.no_grad():
        module.places.weight[4, 1] = float("nan")
    with pytest.raises(ExportError, match=r"; module\.places\.weight: got NaN or infinity in row 4, expected finite"):
        export_module(module, "m", tmp_path, vocab_size=V, max_len=M)
    derived = Mine()
    derived.register_buffer("unused", torch.tensor([1.0, float("inf")]))
    derived.register_forward_hook(lambda _, __, vectors: vectors / 0)
    message = r"by NaN, infinity, or its shape at batch 1, .*; module\.unused: .* in element 1, exp"
    with pytest.raises(ExportError, match=message):
        export_module(derived, "m", tmp_path, vocab_size=V, max_len=M)


def test_export_keeps_training_modes_and_prints_folder(tmp_path: Path) -> None:
    module = Mine().train()
    module.places.eval()
    exported = export_module(module, "mine", tmp_path, vocab_size=V, max_len=M)
    assert (module.training, module.tokens.training, module.places.training) == (True, True, False)
    assert str(exported) == f"ExportResult(folder={exported.folder!r}, warnings=())"


class Reshaped(nn.Module):
    """The sum of tokens and of positions, which are looked up in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(LONG, D)

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        positions = offset[:, None] + torch.arange(input_ids.shape[1])
        places = self.places(positions.reshape(-1)).view(*positions.shape, -1)
        vectors: Tensor = self.tokens(input_ids) + places
        return vectors


def test_reshaped_positions_take_offset_for_each_row(tmp_path: Path) -> None:
    module = Reshaped().eval()
    exported = export_module(module, "reshaped", tmp_path, vocab_size=V, max_len=LONG)
    session, ids = Session(exported.folder), np.array([[1, 2, 3], [4, 5, 6], [0, 7, V - 1]])
    for offset in ([0, LONG - 3, 9], [4]):
        found = session.run({"input_ids": ids, "offset": np.array(offset)})["embeddings"]
        with torch.inference_mode():
            expected = module(torch.from_numpy(ids), torch.tensor(offset)).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_graph_that_onnx_rejects_is_not_published(tmp_path: Path) -> None:
    class Mixed(Reshaped):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)

        def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                vectors: Tensor = self.norm(super().forward(input_ids, offset).bfloat16()).float()
            return vectors

    with pytest.raises(ExportError, match=r"^model\.onnx: ONNX rejects the graph: "):
        export_module(Mixed(), "mixed", tmp_path, vocab_size=V, max_len=LONG)
    assert list(tmp_path.iterdir()) == []


Further = Callable[["Summed", Tensor, Tensor], Tensor]


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


MIXING: list[tuple[str, Further, int, str]] = [
    (
        "first token, from place 80 on",
        lambda module, ids, _: (places(ids) >= 80).reshape(1, -1, 1) * module.vectors(ids)[:, :1],
        100,
        r"got a vector at position (8|9)\d of a row of 100 tokens that differs by",
    ),
    (
        "mean of all rows",
        lambda module, ids, _: module.vectors(ids).mean(0, keepdim=True) / -2,
        20,
        r"got a vector at position \d+ of a row of 20 tokens that",
    ),
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
    for name, further, max_len, message in MIXING:
        found = rejection(ValueError, CustomFrontEnd, Summed(further).eval(), vocab_size=7, max_len=max_len)
        assert re.search(f"^module: .*{message}", found), name


def test_module_with_padding_at_any_id_is_rejected() -> None:
    def count_real(_: Summed, ids: Tensor, offset: Tensor) -> Tensor:
        return (offset.unsqueeze(1) + ids.ne(padding).cumsum(1)).unsqueeze(-1)

    for vocab_size, max_len in ((500, 2), (500, 1000), (2 * COMPARED_IDS, 40)):
        module = Summed(count_real, vocab_size).eval()
        for padding in (0, 39, 499, vocab_size - 1):
            found = rejection(ValueError, CustomFrontEnd, module, vocab_size, max_len)
            assert re.search(r"^module: got a vector at position \d+ of a row of", found), padding
        padding = -1
        CustomFrontEnd(module, vocab_size, max_len)
