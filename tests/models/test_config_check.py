"""Front-ends changed after they were built: their config does not describe the vectors."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from preblock.export import export_module
from preblock.export.errors import ExportError
from preblock.models import BertEmbeddings, FrontEnd, GPT2Embeddings
from preblock.models.config_check import check_described
from tests.models.rejections import rejection

V, D, M = 200, 8, 16


class Doubled(BertEmbeddings):
    def run(self, *arguments: Any, **named: Any) -> Tensor:
        return super().run(*arguments, **named) * 2


class Looking(BertEmbeddings):
    def look_up(self, input_ids: Tensor, scaled: bool = True) -> Tensor:
        return super().look_up(input_ids, scaled) * 2


def add_hook_for_one_id(module: FrontEnd) -> None:
    def hook(_: nn.Module, given: tuple[Tensor], vectors: Tensor) -> Tensor:
        return vectors + given[0].eq(V - 1).unsqueeze(-1)

    module.tokens.register_forward_hook(hook)


def change_epsilon(module: FrontEnd) -> None:
    module.norm.eps = 1e-3


def normalize_weight(module: FrontEnd) -> None:
    nn.utils.parametrizations.weight_norm(module.tokens, "weight")


def become(kind: type[FrontEnd]) -> Callable[[FrontEnd], None]:
    def change(module: FrontEnd) -> None:
        module.__class__ = kind

    return change


CHANGES: list[tuple[Callable[[FrontEnd], None], str]] = [
    (add_hook_for_one_id, "embeddings unlike those of its config and weights; call BertEmbeddings in a module"),
    (change_epsilon, "embeddings unlike those"),
    (become(Doubled), "embeddings unlike those .*; call Doubled in"),
    (become(Looking), "token_embeddings unlike those .*; call Looking in"),
    (normalize_weight, r'weights unlike those of its config: Missing key\(s\) in state_dict: "tokens.weight"'),
]


def test_changed_module_is_neither_saved_nor_exported(tmp_path: Path) -> None:
    for change, message in CHANGES:
        module = BertEmbeddings(V, D, M).train()
        change(module)
        message = f"^module: got {message}"
        assert re.search(message, rejection(ValueError, module.save_frontend, tmp_path / "saved"))
        assert module.training
        assert re.search(message, rejection(ExportError, export_module, module, "changed", tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_check_keeps_mode_and_type_of_each_part() -> None:
    module = BertEmbeddings(V, D, M, dropout=0.5).train()
    module.dropout.eval()
    check_described(module)
    check_described(module.half())
    assert module.training
    assert not module.dropout.training
    assert module.tokens.weight.dtype == torch.float16
    check_described(GPT2Embeddings(V, D, M, dropout=0.5).train())


def test_module_of_mixed_types_is_saved_as_before(tmp_path: Path) -> None:
    module = BertEmbeddings(V, D, M)
    module.norm.half()
    module.save_frontend(tmp_path / "mixed")
    module.norm.to(torch.float8_e4m3fn)
    message = "norm.weight: got float8_e4m3fn, expected float32"
    assert message in rejection(ValueError, module.save_frontend, tmp_path / "narrow")
