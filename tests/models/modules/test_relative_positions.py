"""Relative positions, against the modules of transformers that they stand for."""

import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, XLNetConfig, XLNetModel
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from preblock.models.modules.relative_positions import RelativeSinusoid, T5RelativeBias

HEADS = 4
SETTINGS = pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 256), (8, 20), (64, 1000), (4, 3)])
SIDES = pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])


def t5(buckets: int, max_distance: int, bidirectional: bool) -> tuple[T5RelativeBias, T5Attention]:
    """Our module and the attention of transformers around the same table."""
    torch.manual_seed(0)
    module = T5RelativeBias(HEADS, buckets, max_distance, bidirectional)
    config = T5Config(
        d_model=16,
        d_kv=4,
        num_heads=HEADS,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=not bidirectional,
    )
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    attention.relative_attention_bias.weight = module.weight
    return module, attention


def published(attention: T5Attention, query_offset: int, query_length: int, key_length: int) -> Tensor:
    bias: Tensor = attention.compute_bias(  # type: ignore[no-untyped-call]
        query_length, key_length, past_seen_tokens=query_offset
    )
    return bias


@SETTINGS
@SIDES
@pytest.mark.parametrize(("query_length", "key_length"), [(1, 1), (40, 40), (7, 300), (300, 7), (0, 3), (3, 0)])
def test_t5_bias_equals_transformers(
    buckets: int, max_distance: int, bidirectional: bool, query_length: int, key_length: int
) -> None:
    module, attention = t5(buckets, max_distance, bidirectional)
    expected = published(attention, 0, query_length, key_length)
    assert expected.shape == (1, HEADS, query_length, key_length)
    assert torch.equal(module(0, query_length, key_length), expected)


@SETTINGS
@SIDES
@pytest.mark.parametrize("past", [1, 30, 2000])
def test_t5_bias_with_past_keys_equals_transformers(
    buckets: int, max_distance: int, bidirectional: bool, past: int
) -> None:
    module, attention = t5(buckets, max_distance, bidirectional)
    assert torch.equal(module(past, 3, past + 3), published(attention, past, 3, past + 3))


@SIDES
def test_t5_bias_at_far_distances_equals_transformers(bidirectional: bool) -> None:
    module, attention = t5(32, 10**6, bidirectional)
    assert torch.equal(module(10**6, 1, 1_100_000), published(attention, 10**6, 1, 1_100_000))


@SIDES
def test_t5_bias_with_past_keys_equals_last_rows_of_full_bias(bidirectional: bool) -> None:
    module, _ = t5(32, 128, bidirectional)
    assert torch.equal(module(200, 5, 205), module(0, 205, 205)[:, :, -5:])


@SIDES
def test_t5_bias_gradients_equal_transformers(bidirectional: bool) -> None:
    module, attention = t5(32, 128, bidirectional)
    weights = torch.randn(1, HEADS, 50, 60)
    gradients = []
    for bias in (module(10, 50, 60), published(attention, 10, 50, 60)):
        (bias * weights).sum().backward()
        assert module.weight.grad is not None
        gradients.append(module.weight.grad.clone())
        module.weight.grad = None
    assert torch.equal(*gradients)


def test_future_keys_share_one_bucket_only_in_decoder() -> None:
    decoder, encoder = (t5(32, 128, side)[0] for side in (False, True))
    assert torch.equal(decoder(0, 1, 9), decoder.weight[0].reshape(1, -1, 1, 1).expand(1, HEADS, 1, 9))
    assert len(encoder(0, 1, 8)[0, 0, 0].unique()) == 8


def test_t5_table_starts_normally_distributed() -> None:
    torch.manual_seed(0)
    table = T5RelativeBias(512, 128, 1000, True).weight.detach().double()
    assert table.shape == (128, 512)
    assert abs(table.mean()) < 3e-4
    assert abs(table.std() - 0.02) < 3e-4


def test_t5_bias_has_dtype_of_module() -> None:
    module, _ = t5(32, 128, True)
    expected = module(0, 9, 9).to(torch.bfloat16)
    assert torch.equal(module.to(torch.bfloat16)(0, 9, 9), expected)


@pytest.mark.parametrize(
    ("buckets", "bidirectional", "allowed"), [(1, False, 2), (2, True, 4), (5, True, 4), (0, True, 4)]
)
def test_too_few_buckets_are_rejected(buckets: int, bidirectional: bool, allowed: int) -> None:
    with pytest.raises(ValueError, match=f"buckets: got {buckets}, expected an? .*number of {allowed} or more"):
        T5RelativeBias(HEADS, buckets, 128, bidirectional)


@pytest.mark.parametrize(("bidirectional", "allowed"), [(True, 9), (False, 17)])
def test_max_distance_within_exact_buckets_is_rejected(bidirectional: bool, allowed: int) -> None:
    T5RelativeBias(HEADS, 32, allowed, bidirectional)
    with pytest.raises(ValueError, match=f"max_distance: got {allowed - 1}, expected {allowed} or more"):
        T5RelativeBias(HEADS, 32, allowed - 1, bidirectional)


@pytest.mark.parametrize(
    ("lengths", "name"), [((-1, 2, 3), "query_offset"), ((0, -1, 3), "query_length"), ((0, 2, -1), "key_length")]
)
def test_t5_bias_negative_length_is_rejected(lengths: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got -1, expected 0 or more"):
        T5RelativeBias(HEADS, 32, 128, True)(*lengths)


def xlnet(d_model: int, clamp_len: int | None, bidirectional: bool) -> XLNetModel:
    return XLNetModel(
        XLNetConfig(
            vocab_size=3,
            d_model=d_model,
            n_layer=1,
            n_head=2,
            d_inner=4,
            clamp_len=-1 if clamp_len is None else clamp_len,
            attn_type="bi" if bidirectional else "uni",
        )
    )


@SIDES
@pytest.mark.parametrize("clamp_len", [None, 1, 20, 400])
@pytest.mark.parametrize("d_model", [2, 8, 130])
def test_relative_sinusoid_equals_transformers_xlnet(d_model: int, clamp_len: int | None, bidirectional: bool) -> None:
    module, oracle = RelativeSinusoid(d_model, clamp_len, bidirectional), xlnet(d_model, clamp_len, bidirectional)
    for query_length, key_length in ((1, 1), (7, 7), (1, 50), (5, 300), (300, 3000)):
        expected = oracle.relative_positional_encoding(  # type: ignore[no-untyped-call]
            query_length, key_length
        )[:, 0]
        assert expected.shape == (key_length + (query_length if bidirectional else 1), d_model)
        assert torch.equal(module(query_length, key_length), expected)


@SIDES
def test_relative_sinusoid_scores_equal_xlnet_shift(bidirectional: bool) -> None:
    torch.manual_seed(0)
    queries, keys = 4, 9
    rows = RelativeSinusoid(8, bidirectional=bidirectional)(queries, keys)
    query = torch.randn(queries, 8)
    scores = torch.einsum("id,rd->ir", query, rows).reshape(1, 1, queries, -1)
    shifted = XLNetRelativeAttention.rel_shift_bnij(scores, klen=keys)[0, 0]  # type: ignore[no-untyped-call]
    for i in range(queries):
        seen = keys if bidirectional else keys - queries + i + 1
        for j in range(seen):
            torch.testing.assert_close(shifted[i, j], query[i] @ rows[queries - i + j])


def test_relative_sinusoid_rows_equal_transformer_xl_formula() -> None:
    rows = RelativeSinusoid(6, bidirectional=False)(3, 5)
    distance = torch.arange(5, -1, -1, dtype=torch.float64)
    angle = torch.outer(distance, 10000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6))
    torch.testing.assert_close(rows.double(), torch.cat((angle.sin(), angle.cos()), -1), rtol=0, atol=1e-6)


def test_relative_sinusoid_has_no_parameters_or_state() -> None:
    module = RelativeSinusoid(8)
    assert list(module.parameters()) == []
    assert module.state_dict() == {}


def test_relative_sinusoid_rows_ignore_dtype_cast() -> None:
    expected = RelativeSinusoid(8)(2, 3000)
    assert torch.equal(RelativeSinusoid(8).to(torch.bfloat16)(2, 3000), expected)


def test_relative_sinusoid_is_filled_after_meta_device() -> None:
    module = RelativeSinusoid(8).to("meta")
    assert module(2, 3).device.type == "meta"
    assert torch.equal(module.to_empty(device="cpu")(2, 3), RelativeSinusoid(8)(2, 3))


@pytest.mark.parametrize("d_model", [0, 7])
def test_relative_sinusoid_odd_width_is_rejected(d_model: int) -> None:
    with pytest.raises(ValueError, match=f"d_model: got {d_model}, expected an even width of 2 or more"):
        RelativeSinusoid(d_model)


@pytest.mark.parametrize("clamp_len", [0, -1])
def test_clamp_len_below_one_is_rejected(clamp_len: int) -> None:
    with pytest.raises(ValueError, match=f"clamp_len: got {clamp_len}, expected 1 or more, or None"):
        RelativeSinusoid(8, clamp_len)


@pytest.mark.parametrize(("lengths", "name"), [((-1, 3), "query_length"), ((2, -1), "key_length")])
def test_relative_sinusoid_negative_length_is_rejected(lengths: tuple[int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got -1, expected 0 or more"):
        RelativeSinusoid(8)(*lengths)


def session(module: nn.Module, *lengths: int) -> onnxruntime.InferenceSession:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        program = torch.onnx.export(
            module,
            lengths,
            dynamo=True,
            opset_version=20,
            dynamic_shapes=(torch.export.Dim.DYNAMIC,) * len(lengths),
            verbose=False,
        )
    assert program is not None
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString())


def run(graph: onnxruntime.InferenceSession, **lengths: int) -> Tensor:
    return torch.from_numpy(graph.run(None, {name: np.array(length) for name, length in lengths.items()})[0])


@SIDES
def test_exported_t5_bias_equals_module(bidirectional: bool) -> None:
    module, _ = t5(32, 128, bidirectional)
    graph = session(module, 5, 3, 8)
    for past, queries, keys in ((5, 3, 8), (0, 1, 1), (0, 9, 9), (3000, 1, 3001), (0, 300, 2500), (4, 0, 4), (4, 2, 0)):
        found = run(graph, query_offset=past, query_length=queries, key_length=keys)
        assert torch.equal(found, module(past, queries, keys))


@SIDES
@pytest.mark.parametrize("clamp_len", [None, 5])
def test_exported_relative_sinusoid_equals_module(clamp_len: int | None, bidirectional: bool) -> None:
    module = RelativeSinusoid(16, clamp_len, bidirectional)
    graph = session(module, 3, 8)
    for queries, keys in ((3, 8), (1, 1), (9, 9), (1, 3001), (300, 2500), (0, 4), (2, 0)):
        found = run(graph, query_length=queries, key_length=keys)
        torch.testing.assert_close(found, module(queries, keys), rtol=0, atol=1.2e-7)
