"""The general front-end, against the corresponding modules of transformers."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert import modeling_bert

from preblock.export import export_module
from preblock.export.errors import ExportError
from preblock.models import BertEmbeddings, FrontEnd, GPT2Embeddings, TransformerEmbedding
from preblock.models.config import FrontEndConfig
from preblock.models.config_check import check_described
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.models.modules.positions import SinusoidalPositionalEncoding
from preblock.models.steps import Positions, Tokens
from tests.models.rejections import rejection

V, D, M, S, PADDING = 50, 16, 12, 3, 4
IDS = torch.tensor([[3, 0, 49, 7, 7], [1, 2, 48, PADDING, PADDING]])
SEGMENTS = torch.tensor([[0, 1, 2, 2, 0], [1, 1, 1, 0, 0]])


@pytest.fixture
def oracle() -> modeling_bert.BertEmbeddings:
    torch.manual_seed(1)
    config = BertConfig(vocab_size=V, hidden_size=D, max_position_embeddings=M, type_vocab_size=S, pad_token_id=PADDING)
    module = modeling_bert.BertEmbeddings(config)  # type: ignore[no-untyped-call]
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.eval()


@pytest.fixture
def bert(oracle: modeling_bert.BertEmbeddings) -> FrontEnd:
    """A front-end around the tensors of `oracle`."""
    config = BertEmbeddings(V, D, M, S, PADDING).config
    tensors = {
        "tokens.weight": oracle.word_embeddings.weight,
        "segments.weight": oracle.token_type_embeddings.weight,
        "positions.weight": oracle.position_embeddings.weight,
        "norm.weight": oracle.LayerNorm.weight,
        "norm.bias": oracle.LayerNorm.bias,
    }
    return FrontEnd.from_tensors(config, tensors).eval()


def test_bert_equals_transformers(bert: FrontEnd, oracle: modeling_bert.BertEmbeddings) -> None:
    assert torch.equal(bert(IDS), oracle(IDS))
    assert torch.equal(bert(IDS, token_type_ids=SEGMENTS), oracle(IDS, SEGMENTS))
    position_ids = torch.tensor([[11, 0, 5, 5, 1], [0, 1, 2, 0, 0]])
    assert torch.equal(bert(IDS, position_ids=position_ids), oracle(IDS, position_ids=position_ids))
    assert torch.equal(bert(IDS, 7), oracle(IDS, cache_length=7))


def test_bert_gradients_equal_transformers(bert: FrontEnd, oracle: modeling_bert.BertEmbeddings) -> None:
    weights = torch.randn(2, 5, D)
    (oracle(IDS, SEGMENTS) * weights).sum().backward()
    expected = [parameter.grad for parameter in oracle.parameters()]
    oracle.zero_grad()
    (bert(IDS, token_type_ids=SEGMENTS) * weights).sum().backward()
    found = [parameter.grad for parameter in oracle.parameters()]
    assert len(expected) == 5
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert bert.tokens.weight.grad is not None
    assert not bert.tokens.weight.grad[PADDING].any()


def test_transformer_embedding_is_scaled_table_plus_positions() -> None:
    for embedding in (TransformerEmbedding(V, D, M, "learned"), TransformerEmbedding(V, D, M, "sinusoidal")):
        frontend = embedding.eval()
        table = nn.Embedding(V, D, _weight=frontend.tokens.weight)
        assert torch.equal(frontend(IDS, 2), table(IDS) * math.sqrt(D) + frontend.positions(IDS, offset=2))
    # Sinusoids continue beyond their table.
    frontend = TransformerEmbedding(V, D, M, scale=False).eval()
    table = nn.Embedding(V, D, _weight=frontend.tokens.weight)
    assert torch.equal(frontend(IDS, 1000), table(IDS) + SinusoidalPositionalEncoding(D, 2000)(IDS, offset=1000))


@pytest.mark.parametrize("build", [TransformerEmbedding, BertEmbeddings, GPT2Embeddings])
def test_dropout_applies_once_and_only_in_training(build: Callable[..., FrontEnd]) -> None:
    torch.manual_seed(3)
    frontend = build(V, 512, M, dropout=0.5)
    expected, found = frontend.eval()(IDS), frontend.train()(IDS)
    kept = found != 0
    # Twice would keep a quarter, and multiply by four.
    assert 0.48 < kept.float().mean() < 0.52
    assert torch.equal(found[kept], expected[kept] * 2)
    assert torch.equal(frontend.eval()(IDS), expected)


def test_invalid_call_of_front_end_is_rejected() -> None:
    message = "token_type_ids: the front-end 'gpt2' has no such index, expected none"
    assert message in rejection(ValueError, GPT2Embeddings(V, D, M), IDS, token_type_ids=SEGMENTS)
    for index, got in (
        (SEGMENTS, "got 2, expected 0 to 1"),
        (-SEGMENTS, "got -2, expected 0 to 1"),
        (SEGMENTS[:, :4], "got shape (2, 4), expected (1, 5) or (2, 5)"),
    ):
        found = rejection(ValueError, BertEmbeddings(V, D, M), IDS, token_type_ids=index)
        assert found == f"token_type_ids: {got}"
    message = "attention_mask: the front-end 'gpt2' does not use one; pass position_ids"
    assert message in rejection(ValueError, GPT2Embeddings(V, D, M), IDS, attention_mask=torch.ones_like(IDS))
    message = "token_type_ids is given twice: also in indices"
    given = {"token_type_ids": SEGMENTS, "indices": {"token_type_ids": SEGMENTS}}
    assert rejection(ValueError, BertEmbeddings(V, D, M), IDS, **given) == message
    message = "length 5 + offset 8 = 13 exceeds the maximum length 12"
    for build in (BertEmbeddings, GPT2Embeddings):
        assert message in rejection(ValueError, build(V, D, M), IDS, 8)
    steps = Tokens(rows=V, width=D), Positions(rows=M, counts="ids", first=1)
    counted = FrontEndConfig(family="counted", steps=steps, max_len=M - 1, padding_idx=PADDING)
    assert rejection(ValueError, FrontEnd(counted), IDS, 7) == "position 11 exceeds the maximum length 11"


def test_sizes_may_be_integers_of_numpy() -> None:
    ids = torch.tensor([[6, 0]])
    embeddings = GPT2Embeddings(np.int64(7), np.int32(4), 4)  # type: ignore[arg-type]
    assert embeddings(ids).shape == (1, 2, 4)
    signature = CustomFrontEnd(embeddings.eval(), np.int64(7), np.int32(4)).signature  # type: ignore[arg-type]
    assert (type(signature.vocab_size), type(signature.max_len)) == (int, int)


def test_wrong_argument_of_front_end_is_rejected() -> None:
    cases: list[tuple[Callable[..., object], tuple[Any, ...], str]] = [
        (GPT2Embeddings, (0, 4, 4), "tokens.rows: got 0, expected a whole number from 1 on"),
        (GPT2Embeddings, (4, 0, 4), "tokens.width: got 0"),
        (GPT2Embeddings, (4, 4.0, 4), "tokens.width: got 4.0"),
        (BertEmbeddings, (4, 4, 4, -1), "token_type_ids.rows: got -1"),
        (CustomFrontEnd, (GPT2Embeddings(7, 4, 4), 7, 2**24 + 1), "max_len: got 16777217, expected at most 16777216"),
        (TransformerEmbedding, (4, 4, 4, "learnt"), "positions: got 'learnt', expected sinusoidal, learned"),
    ]
    for build, arguments, message in cases:
        assert rejection(ValueError, build, *arguments).startswith(message)


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
