"""Pairwise biases: configurations, against files of transformers, and modules, against those of transformers."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, T5Config, XLNetConfig, XLNetModel
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.config import FrontEndConfig
from preblock.models.families import FAMILIES
from preblock.models.families.named_steps import MAX_COUNT
from preblock.models.families.published_config import Config
from preblock.models.frontend import FrontEnd
from preblock.models.modules.alibi import AlibiBias
from preblock.models.modules.bias import BiasConfig, RelativeSinusoidConfig
from preblock.models.modules.relative_positions import RelativeSinusoid, T5RelativeBias
from tests.families.bias_models import BIASED, HEADS, save
from tests.models.rejections import rejection

BUCKETS = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def side_of(name: str) -> str | None:
    return name.partition("/")[2] or None


def bias_of(name: str, values: dict[str, Any]) -> BiasConfig | None:
    read = FAMILIES[name].bias
    return read(Config(values)) if read else None


@pytest.mark.parametrize("name", BIASED)
def test_bias_is_read_from_checkpoint_and_from_document(name: str, tmp_path: Path) -> None:
    weights = dict(save(name, tmp_path).named_parameters())
    frontend = FrontEnd.from_data(read_frontend(tmp_path, side_of(name)))
    state = frontend.state_dict()
    assert ("bias.weight" in state) == name.startswith("t5/")
    if name.startswith("t5/"):
        assert torch.equal(state["bias.weight"], weights[BUCKETS.format(side_of(name))])
    document = json.loads(json.dumps(frontend.config.to_document()))
    assert "weight" not in document["bias"]
    again = type(frontend).from_tensors(FrontEndConfig.from_document(document), state)
    lengths = (3, 4) if name == "xlnet" else (2, 3, 4)
    assert torch.equal(again.bias(*lengths), frontend.bias(*lengths))


def test_missing_bias_values_have_transformers_defaults() -> None:
    for name in BIASED:
        library = CONFIG_MAPPING[name.partition("/")[0]]().to_dict() | {"alibi": True}
        assert bias_of(name, {"alibi": True}) == bias_of(name, library), name
    assert bias_of("mpt", {"attn_config": None}) == bias_of("mpt", {})
    assert bias_of("falcon", {}) is None


def test_other_bias_values_and_key_names_are_read() -> None:
    assert {name for name, row in FAMILIES.items() if row.bias} == set(BIASED)
    assert bias_of("bloom", {"num_attention_heads": 3, "n_head": 3}) == bias_of("bloom", {"num_attention_heads": 3})
    assert bias_of("xlnet", {"hidden_size": 6}) == bias_of("xlnet", {"d_model": 6})
    one_way = RelativeSinusoidConfig(width=1024, clamp_len=5, bidirectional=False)
    assert bias_of("xlnet", {"attn_type": "uni", "clamp_len": 5}) == one_way


INVALID: dict[str, list[tuple[dict[str, Any], str]]] = {
    "mpt": [
        ({"attn_config": {"alibi": False}}, "attn_config.alibi is False, understood is True"),
        ({"attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max is 16, understood is 8"),
        ({"attn_config": 3}, "attn_config is 3, understood is an object"),
        ({"n_heads": 0}, f"n_heads: got 0, expected 1 to {MAX_COUNT}"),
    ],
    "bloom": [({"num_attention_heads": 4}, "num_attention_heads is 4, understood is 6, as n_head")],
    "falcon": [
        ({"alibi": "yes"}, "alibi is 'yes', understood is True or False"),
        ({"num_attention_heads": 0}, f"num_attention_heads: got 0, expected 1 to {MAX_COUNT}"),
    ],
    "xlnet": [
        ({"bi_data": True}, "bi_data is True, understood is False"),
        ({"attn_type": "other"}, "attn_type is 'other', understood is 'bi' or 'uni'"),
        ({"clamp_len": 2.5}, "clamp_len: got 2.5, expected 1 or more"),
    ],
    "t5/decoder": [({"num_heads": 2.0}, f"num_heads: got 2.0, expected 1 to {MAX_COUNT}")],
    "t5/encoder": [({"num_heads": 3}, "disagree: "), ({"relative_attention_num_buckets": 16}, "disagree: ")],
}


@pytest.mark.parametrize("name", INVALID)
def test_unsupported_bias_value_is_rejected(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    valid = (tmp_path / "config.json").read_text()
    for values, message in INVALID[name]:
        (tmp_path / "config.json").write_text(json.dumps(json.loads(valid) | values))
        found = rejection(CheckpointError, read_frontend, tmp_path, side_of(name))
        assert "config.json" in found, values
        assert message in found, values


def test_missing_bias_table_is_rejected(tmp_path: Path) -> None:
    save("t5/decoder", tmp_path)
    file, key = tmp_path / "model.safetensors", BUCKETS.format("decoder")
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors, file, metadata={"format": "pt"})
    assert f"no tensor {key}" in rejection(CheckpointError, read_frontend, tmp_path, "decoder")
    read_frontend(tmp_path, "encoder")


SIDES = pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])


def t5_modules(buckets: int, max_distance: int, bidirectional: bool) -> tuple[T5RelativeBias, T5Attention]:
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
    module, attention = t5_modules(buckets, max_distance, bidirectional)
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
        assert rejection(ValueError, t5_modules(32, 128, True)[0], *lengths) == f"{name}: got -1, expected 0 or more"


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


def test_alibi_bias_is_negative_slope_times_distance() -> None:
    """12 heads take the slopes of 8, and every other one of 16 (Press et al. 2022)."""
    distances = torch.tensor([[3, 2, 1, 0, -1, -2], [4, 3, 2, 1, 0, -1]])
    slopes = [2.0**-power for power in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)]
    assert torch.equal(AlibiBias(12)(3, 2, 6)[0], -torch.tensor(slopes).reshape(-1, 1, 1) * distances)


def test_alibi_variants_match_transformers_bit_for_bit() -> None:
    """Of 31, 127 and 255 heads, torch divides the powers into other blocks without AVX-512 (test_frequencies.py)."""
    mask = torch.ones((1, 1000), dtype=torch.int64)
    others = (31, 127, 255) if torch.backends.cpu.get_cpu_capability() == "AVX512" else ()
    for heads in (1, 2, 3, 7, 12, 32, 71, *others):
        bloom = modeling_bloom.build_alibi_tensor(mask, heads, torch.float32)
        mpt = build_mpt_alibi_tensor(heads, 1000)  # type: ignore[no-untyped-call]
        falcon = modeling_falcon.build_alibi_tensor(mask, heads, torch.float32)
        for module, row in (
            (AlibiBias(heads, "first", "float32_powers"), bloom),
            (AlibiBias(heads, "last", "float32_reciprocals"), mpt),
            (AlibiBias(heads, "first", "float32_powers", "bfloat16"), falcon),
            (AlibiBias(heads, "first", "float32_powers", "bfloat16", math.sqrt(80)), falcon / math.sqrt(80)),
        ):
            assert torch.equal(module(7, 2, 1000)[0], row.expand(-1, 2, -1)), (heads, module)


def test_invalid_alibi_arguments_are_rejected() -> None:
    for values, message in (
        ({"heads": 0}, "heads: got 0, expected 1 to 65536"),
        ({"anchor": "key"}, "anchor: got 'key', expected query, first, last"),
        ({"recipe": "fast"}, "recipe: got 'fast', expected exact, float32_powers, float32_reciprocals"),
        ({"arithmetic": "float16"}, "arithmetic: got 'float16', expected float32, bfloat16"),
        ({"divisor": 0}, "divisor: got 0, expected a number above 0 within float32"),
    ):
        assert rejection(ValueError, AlibiBias, **{"heads": 4} | values) == message
    for lengths, name in (((-1, 2, 3), "query_offset"), ((0, -1, 3), "query_length"), ((0, 2, -1), "key_length")):
        for anchor in ("query", "first"):
            assert rejection(ValueError, AlibiBias(2, anchor), *lengths) == f"{name}: got -1, expected 0 or more"
