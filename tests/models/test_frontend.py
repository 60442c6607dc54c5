"""The general front-end, against the corresponding modules of transformers."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model
from transformers.models.bert import modeling_bert

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.custom_frontend import CustomFrontEnd
from preblock.models.embeddings import BertEmbeddings, GPT2Embeddings, TransformerEmbedding
from preblock.models.frontend import FrontEnd
from preblock.models.modules.positions import SinusoidalPositionalEncoding

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


def test_bert_without_segments_equals_transformers(bert: FrontEnd, oracle: modeling_bert.BertEmbeddings) -> None:
    assert torch.equal(bert(IDS), oracle(IDS))


def test_bert_with_segments_equals_transformers(bert: FrontEnd, oracle: modeling_bert.BertEmbeddings) -> None:
    assert torch.equal(bert(IDS, token_type_ids=SEGMENTS), oracle(IDS, SEGMENTS))
    assert not torch.equal(bert(IDS, token_type_ids=SEGMENTS), bert(IDS))


def test_bert_with_position_ids_equals_transformers(bert: FrontEnd, oracle: modeling_bert.BertEmbeddings) -> None:
    position_ids = torch.tensor([[11, 0, 5, 5, 1], [0, 1, 2, 0, 0]])
    assert torch.equal(bert(IDS, position_ids=position_ids), oracle(IDS, position_ids=position_ids))


def test_bert_with_offset_equals_transformers(bert: FrontEnd, oracle: modeling_bert.BertEmbeddings) -> None:
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


def test_bert_checkpoint_equals_transformers(checkpoint: Path) -> None:
    frontend = read_frontend(checkpoint).eval()
    embeddings = BertModel.from_pretrained(checkpoint).embeddings.eval()
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(30522, (3, 512), generator=generator)
    segments = torch.randint(2, (3, 512), generator=generator)
    with torch.inference_mode():
        assert torch.equal(frontend(input_ids), embeddings(input_ids))
        assert torch.equal(frontend(input_ids, 0, segments), embeddings(input_ids, segments))


@pytest.fixture
def gpt2() -> GPT2Model:
    torch.manual_seed(2)
    model = GPT2Model(GPT2Config(vocab_size=V, n_embd=D, n_positions=M, n_layer=2, n_head=2))
    model.train(False)
    return model


def entering_block_0(model: GPT2Model, input_ids: Tensor, fed: int) -> Tensor:
    """Return the input of the first block of `model` after the first `fed` tokens."""
    caught: list[Tensor] = []
    with torch.inference_mode():
        past = model(input_ids[:, :fed], use_cache=True).cache if fed else None
        hook = model.h[0].register_forward_pre_hook(lambda _, args: caught.append(args[0]))
        model(input_ids[:, fed:], cache=past, use_cache=True)
        hook.remove()
    return caught[0]


@pytest.mark.parametrize("fed", [0, 1, 3])
def test_gpt2_equals_transformers_block_0_input(gpt2: GPT2Model, fed: int) -> None:
    tensors = {"tokens.weight": gpt2.wte.weight, "positions.weight": gpt2.wpe.weight}
    frontend = FrontEnd.from_tensors(GPT2Embeddings(V, D, M).config, tensors).eval()
    assert torch.equal(frontend(IDS[:, fed:], fed), entering_block_0(gpt2, IDS, fed))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_transformer_embedding_is_scaled_table_plus_positions(positions: str) -> None:
    frontend = TransformerEmbedding(V, D, M, "learned" if positions == "learned" else "sinusoidal").eval()
    table = nn.Embedding(V, D, _weight=frontend.tokens.weight)
    rows = frontend.positions(IDS, offset=2)
    assert torch.equal(frontend(IDS, 2), table(IDS) * math.sqrt(D) + rows)


def test_transformer_embedding_extends_sinusoids_beyond_table() -> None:
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


def test_training_changes_every_parameter() -> None:
    torch.manual_seed(4)
    frontend = BertEmbeddings(V, D, M, dropout=0.0)
    before = {name: parameter.detach().clone() for name, parameter in frontend.named_parameters()}
    target, optimizer = torch.randn(2, 5, D), torch.optim.Adam(frontend.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = ((frontend(IDS) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
    for name, parameter in frontend.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_from_tensors_shares_memory() -> None:
    source = BertEmbeddings(V, D, M)
    tensors = source.state_dict()
    built = FrontEnd.from_tensors(source.config, tensors)
    for name, tensor in built.state_dict().items():
        assert tensor.data_ptr() == tensors[name].data_ptr(), name


def test_from_tensors_restores_sinusoids() -> None:
    source = TransformerEmbedding(V, D, M).eval()
    built = FrontEnd.from_tensors(source.config, source.state_dict()).eval()
    assert torch.equal(built(IDS, 3), source(IDS, 3))


@pytest.mark.parametrize("change", ["missing", "unknown", "reshaped"])
def test_from_tensors_with_wrong_tensors_is_rejected(change: str) -> None:
    source = GPT2Embeddings(V, D, M)
    tensors = dict(source.state_dict())
    if change == "missing":
        del tensors["positions.weight"]
    elif change == "unknown":
        tensors["norm.weight"] = torch.ones(D)
    else:
        tensors["tokens.weight"] = torch.ones(V, D + 1)
    with pytest.raises(RuntimeError, match=r"positions\.weight|norm\.weight|tokens\.weight"):
        FrontEnd.from_tensors(source.config, tensors)


def test_state_dict_round_trips_through_file(tmp_path: Path) -> None:
    source, other = BertEmbeddings(V, D, M).eval(), BertEmbeddings(V, D, M).eval()
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(other(IDS), source(IDS))


def test_token_type_ids_without_segments_are_rejected() -> None:
    with pytest.raises(ValueError, match="token_type_ids: the front-end 'gpt2' has no such index, expected none"):
        GPT2Embeddings(V, D, M)(IDS, token_type_ids=SEGMENTS)


@pytest.mark.parametrize("build", [BertEmbeddings, GPT2Embeddings])
def test_sequence_longer_than_max_len_is_rejected(build: Callable[..., FrontEnd]) -> None:
    with pytest.raises(ValueError, match=r"length 5 \+ offset 8 = 13 exceeds the maximum length 12"):
        build(V, D, M)(IDS, 8)


def test_position_tables_have_published_parameter_share() -> None:
    with torch.device("meta"):
        bert, gpt2 = BertEmbeddings(30522, 768, 512), GPT2Embeddings(50257, 768, 1024)
    for frontend, percent in ((bert, 1.7), (gpt2, 2.0)):
        assert (
            round(100 * frontend.get_parameter("positions.weight").numel() / frontend.tokens.weight.numel(), 1)
            == percent
        )
    assert gpt2.tokens.weight.nbytes == 154_389_504
    assert gpt2.get_parameter("positions.weight").nbytes == 3_145_728


def test_sizes_may_be_integers_of_numpy() -> None:
    ids = torch.tensor([[6, 0]])
    embeddings = GPT2Embeddings(np.int64(7), np.int32(4), 4)  # type: ignore[arg-type]
    assert embeddings(ids).shape == (1, 2, 4)
    signature = CustomFrontEnd(embeddings.eval(), np.int64(7), np.int32(4)).signature  # type: ignore[arg-type]
    assert (type(signature.vocab_size), type(signature.max_len)) == (int, int)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GPT2Embeddings(0, 4, 4), r"tokens\.rows: got 0, expected a whole number from 1 on"),
        (lambda: GPT2Embeddings(-1, 4, 4), r"tokens\.rows: got -1"),
        (lambda: GPT2Embeddings(4, 0, 4), r"tokens\.width: got 0"),
        (lambda: GPT2Embeddings(4, 4.0, 4), r"tokens\.width: got 4\.0"),  # type: ignore[arg-type]
        (lambda: BertEmbeddings(4, 4, 4, segments=-1), r"token_type_ids\.rows: got -1"),
        (
            lambda: CustomFrontEnd(GPT2Embeddings(7, 4, 4), 7, 2**24 + 1),
            "max_len: got 16777217, expected at most 16777216",
        ),
        (lambda: TransformerEmbedding(4, 4, 4, "learnt"), "positions: got 'learnt', expected sinusoidal, learned"),  # type: ignore[arg-type]
    ],
)
def test_wrong_argument_of_front_end_is_rejected(build: Callable[[], FrontEnd | CustomFrontEnd], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        build()
