"""A user's own module, exported by one call, proven and served like any other."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from preblock.export import export_module
from preblock.export.errors import ExportError, UnrepeatableError
from preblock.export.exporter import ExportResult, export
from preblock.export.verification import verify
from preblock.models import BertEmbeddings
from preblock.service.artifacts.manifest import Manifest
from preblock.service.core.auth import SERVICE
from preblock.service.core.errors import Invalid
from preblock.service.core.types import TokenRequest, TokenRows
from preblock.service.runtime.model import TokenModel
from preblock.service.runtime.providers import CPU
from preblock.service.runtime.repository import Repository
from tests.clients.client_matrix import check_standard
from tests.data.make_artifacts import build_frontend
from tests.support.engines import ask_engine, open_engine
from tests.support.shared import Shared

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


@pytest.fixture(scope="module")
def mine() -> Mine:
    return Mine()


@pytest.fixture(scope="module")
def exported(mine: Mine, shared: Shared) -> ExportResult:
    return shared.build("mine", lambda root: export_module(mine, "mine", root, vocab_size=V, max_len=M))


def test_module_parity_covers_batch_length_and_offset(exported: ExportResult) -> None:
    parity = exported.parity.providers[CPU].outputs["embeddings"]
    cases: list[dict[str, Any]] = [case.arguments for case in parity.cases]
    assert {(case["batch"], case["length"]) for case in cases} == {(b, n) for b in (1, 2, 5) for n in (1, 2, M)}
    assert max(len(case["offset"]) for case in cases) == 5
    assert parity.max_ulp <= 8


def test_module_graph_follows_onnx_standard(exported: ExportResult) -> None:
    check_standard(exported.folder)


def test_exported_module_is_served(mine: Mine, exported: ExportResult) -> None:
    ids = np.array([[1, 2, 3], [4, 5, 12]])
    request = TokenRequest(input_ids=TokenRows.of_array(ids), offset=np.array([0, 6]))
    with open_engine(exported.folder.parents[1]) as engine:
        model = engine.repository.get("mine")
        answer = asyncio.run(ask_engine(engine, model, request))
        with pytest.raises(Invalid, match="got 7 \\+ 3 = 10, expected at most 9"):
            asyncio.run(ask_engine(engine, model, replace(request, offset=np.array([0, 7]))))
    with torch.inference_mode():
        expected = mine(torch.from_numpy(ids), torch.tensor([0, 6])).numpy()
    np.testing.assert_allclose(
        answer.arrays["embeddings"].reshape(2, 3, D).astype(np.float32), expected, rtol=0, atol=1e-6
    )


def test_verify_of_custom_module_reports_unrepeatable_proof(exported: ExportResult) -> None:
    assert isinstance(exported.manifest, Manifest)
    assert (exported.manifest.front_end, exported.manifest.token_embeddings) == (None, None)
    with pytest.raises(UnrepeatableError, match="hashes agree; the proof cannot be repeated"):
        verify(exported.folder)


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


@pytest.mark.parametrize("kind", ["range", "shift", "slice"])
def test_module_with_integer_offset_is_exported(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: the module, called once for each row."""
    module = Counted(kind)
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


class Running(Mine):
    """Adds up the vectors of a row: each depends on all tokens before."""

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        return super().forward(input_ids, offset).cumsum(1)


class OneToken(Mine):
    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        if input_ids.shape[1] > 1:
            raise IndexError("one token only")
        return super().forward(input_ids, offset)


class FirstTokens(Mine):
    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        return super().forward(input_ids, offset)[:, :3]


class Doubled(BertEmbeddings):
    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        return super().forward(*arguments, **named) * 2


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (
            Ageless(),
            {"vocab_size": V, "max_len": M},
            r"module: got forward\(input_ids.*, expected forward\(input_ids, off",
        ),
        (Mine(), {"max_len": M}, "vocab_size: got nothing, expected a number, because a Mine does not state it"),
        (Mine(), {"vocab_size": V}, "max_len: got nothing"),
        (Mine(), {"vocab_size": 0, "max_len": M}, "vocab_size: got 0, expected a whole number from 1 on"),
        (Mine(), {"vocab_size": V, "max_len": 9.0}, r"max_len: got 9\.0, expected a whole number"),
        (
            Mine(),
            {"vocab_size": V + 1, "max_len": M},
            "vocab_size: the module fails for id 13 at position 0: IndexError",
        ),
        (Mine(), {"vocab_size": V, "max_len": M + 1}, "max_len: the module fails for id 0 at position 9: IndexError"),
        (
            Mine().to("meta"),
            {"vocab_size": V, "max_len": M},
            "module: got vectors on the device meta, expected cpu",
        ),
        (
            Running(),
            {"vocab_size": V, "max_len": M},
            r"module: got a vector at position \d of a row of 9 tokens that differs by [\d.]+ from that of the token",
        ),
        (
            OneToken(),
            {"vocab_size": V, "max_len": M},
            "module: the module fails for 9 ids at position 0: IndexError: one token only",
        ),
        (
            FirstTokens(),
            {"vocab_size": V, "max_len": M},
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
        (Doubled(V, D, M), {}, "module: got embeddings unlike those of its config"),
    ],
)
def test_wrong_arguments_for_module_are_rejected(
    module: nn.Module, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        export_module(module, "m", tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("biased", [False, True])
def test_front_end_module_is_exported_with_description(biased: bool, tmp_path: Path) -> None:
    frontend = build_frontend("alibi") if biased else BertEmbeddings(V, D, M)
    exported = export_module(frontend, "trained", str(tmp_path))
    assert exported.manifest.front_end is not None
    assert verify(exported.folder).providers[CPU].outputs.keys() >= {"embeddings"}


class Frozen(Mine):
    """Leaves the offset out of its graph."""

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        return super().forward(input_ids, torch.ones_like(offset) if torch.compiler.is_compiling() else offset)


class Wide(nn.Module):
    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:
        return (input_ids + offset).to(torch.float32)


def test_module_with_constant_offset_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="offset is baked in: offset 8 gives the vectors of 0"):
        export_module(Frozen(), "frozen", tmp_path, vocab_size=V, max_len=M)
    assert list(tmp_path.iterdir()) == []


def test_module_without_vector_output_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"module: got torch.float32 \(1, 1\) for ids \(1, 1\)"):
        export_module(Wide(), "wide", tmp_path, vocab_size=V, max_len=M)


def test_module_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    module = Mine()
    module.number, module.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(2, 0))
    module.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with torch.no_grad():
        module.places.weight[4, 1] = float("nan")
    with pytest.raises(ExportError, match=r"; module\.places\.weight: got NaN or infinity in row 4, expected finite"):
        export_module(module, "m", tmp_path, vocab_size=V, max_len=M)


def test_export_keeps_training_modes_and_prints_folder(tmp_path: Path) -> None:
    module = Mine().train()
    module.places.eval()
    exported = export_module(module, "mine", tmp_path, vocab_size=V, max_len=M)
    assert (module.training, module.tokens.training, module.places.training) == (True, True, False)
    assert str(exported) == f"ExportResult(folder={exported.folder!r}, warnings=())"


class Segments(nn.Module):
    def forward(self, input_ids: Tensor, token_type_ids: Tensor, offset: int = 0) -> Tensor:
        return nn.functional.one_hot(input_ids + token_type_ids + offset, V + M).float()


class Unplaced(nn.Module):
    """Adds positions from 0 on, whatever the offset."""

    def forward(self, input_ids: Tensor, offset: Tensor) -> Tensor:  # noqa: ARG002
        return nn.functional.one_hot(input_ids, V).float() + torch.arange(input_ids.shape[1]).view(-1, 1)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Segments(), "whose second argument would receive the offset, not token_type_ids; expected forward"),
        (
            Unplaced(),
            "position; does forward add its second argument, the offset, to the positions",
        ),
        (Mine, "module: got the class Mine, expected an instance of torch.nn.Module"),
        (torch.tanh, "module: got a builtin_function_or_method, expected an instance of torch.nn.Module"),
    ],
)
def test_module_without_offset_is_rejected_with_hint(module: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        export_module(module, "m", tmp_path, vocab_size=V, max_len=M)


def test_saved_front_end_is_exported_with_trained_weights(tmp_path: Path) -> None:
    frontend = BertEmbeddings(V, D, M)
    optimizer = torch.optim.SGD(frontend.parameters(), lr=0.1)
    ids = torch.tensor([[1, 2, 12], [3, 0, 5]])
    frontend(ids).square().sum().backward()
    optimizer.step()
    frontend.save_frontend(tmp_path / "trained")
    exported = export(str(tmp_path / "trained"), "trained", tmp_path / "models")
    verify(exported.folder)
    (model,) = Repository(tmp_path / "models").all(SERVICE)
    assert isinstance(model, TokenModel)
    feeds = {"input_ids": ids.numpy(), "token_type_ids": np.zeros_like(ids.numpy()), "offset": np.array([2])}
    found = model.run(feeds, ("embeddings",))["embeddings"]
    expected = frontend.eval()(ids, offset=2).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert model.manifest.family == "bert"
