"""Relative positions, against the modules of transformers that they stand for."""

import re

import pytest
import torch
from transformers import T5Config, XLNetConfig, XLNetModel
from transformers.models.t5.modeling_t5 import T5Attention

from preblock.models.modules.relative_positions import RelativeSinusoid, T5RelativeBias
from tests.models.rejections import rejection

HEADS = 4
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


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 256), (8, 20), (64, 1000), (4, 3)])
@SIDES
def test_t5_bias_equals_transformers(buckets: int, max_distance: int, bidirectional: bool) -> None:
    module, attention = t5(buckets, max_distance, bidirectional)
    for lengths in ((0, 1, 1), (0, 7, 300), (0, 300, 7), (0, 0, 3), (0, 3, 0), (30, 3, 33), (2000, 3, 2003)):
        past, queries, keys = lengths
        expected = attention.compute_bias(queries, keys, past_seen_tokens=past)  # type: ignore[no-untyped-call]
        assert expected.shape == (1, HEADS, *lengths[1:])
        assert torch.equal(module(*lengths), expected), lengths


def test_invalid_t5_arguments_are_rejected() -> None:
    for buckets, bidirectional, allowed in ((1, False, 2), (2, True, 4), (5, True, 4)):
        kind = f"expected an? .*number of {allowed} or more"
        found = rejection(ValueError, T5RelativeBias, HEADS, buckets, 128, bidirectional)
        assert re.match(f"buckets: got {buckets}, {kind}", found)
    for bidirectional, allowed in ((True, 9), (False, 17)):
        T5RelativeBias(HEADS, 32, allowed, bidirectional)
        found = rejection(ValueError, T5RelativeBias, HEADS, 32, allowed - 1, bidirectional)
        assert found == f"max_distance: got {allowed - 1}, expected {allowed} or more"
    for lengths, name in (((-1, 2, 3), "query_offset"), ((0, -1, 3), "query_length"), ((0, 2, -1), "key_length")):
        assert rejection(ValueError, t5(32, 128, True)[0], *lengths) == f"{name}: got -1, expected 0 or more"


@SIDES
@pytest.mark.parametrize(("d_model", "clamp_len"), [(2, None), (8, 1), (8, 20), (130, 400), (130, None)])
def test_relative_sinusoid_equals_transformers_xlnet(d_model: int, clamp_len: int | None, bidirectional: bool) -> None:
    module, sizes = RelativeSinusoid(d_model, clamp_len, bidirectional), {"n_layer": 1, "n_head": 2, "d_inner": 4}
    directions = {"clamp_len": clamp_len or -1, "attn_type": "bi" if bidirectional else "uni"}
    oracle = XLNetModel(XLNetConfig(vocab_size=3, d_model=d_model, **sizes, **directions))  # type: ignore[arg-type]
    for query_length, key_length in ((1, 1), (7, 7), (1, 50), (5, 300), (300, 3000)):
        expected = oracle.relative_positional_encoding(  # type: ignore[no-untyped-call]
            query_length, key_length
        )[:, 0]
        assert expected.shape == (key_length + (query_length if bidirectional else 1), d_model)
        assert torch.equal(module(query_length, key_length), expected)


def test_invalid_relative_sinusoid_arguments_are_rejected() -> None:
    for d_model in (0, 7):
        message = f"d_model: got {d_model}, expected an even width of 2 or more"
        assert rejection(ValueError, RelativeSinusoid, d_model) == message
    for clamp_len in (0, -1):
        message = f"clamp_len: got {clamp_len}, expected 1 or more, or None"
        assert rejection(ValueError, RelativeSinusoid, 8, clamp_len) == message
    for lengths, name in (((-1, 3), "query_length"), ((2, -1), "key_length")):
        assert rejection(ValueError, RelativeSinusoid(8), *lengths) == f"{name}: got -1, expected 0 or more"
