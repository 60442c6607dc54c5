"""Configurations of pairwise biases, against files of transformers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.config import FrontEndConfig
from preblock.models.families import FAMILIES
from preblock.models.families.published_config import Config
from preblock.models.frontend import FrontEnd
from preblock.models.modules.bias import (
    AlibiConfig,
    BiasConfig,
    RelativeSinusoidConfig,
    T5Config,
    from_document,
    to_document,
)
from tests.families.bias_models import BIASED, HEADS, save
from tests.models.rejections import rejection

BUCKETS = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def t5(side: str) -> T5Config:
    return T5Config(
        heads=HEADS, buckets=32, max_distance=128, bidirectional=side == "encoder", weight=(BUCKETS.format(side),)
    )


EXPECTED: dict[str, BiasConfig] = {
    "bloom": AlibiConfig(heads=HEADS, anchor="first", recipe="float32_powers"),
    "mpt": AlibiConfig(heads=HEADS, anchor="last", recipe="float32_reciprocals"),
    "falcon": AlibiConfig(
        heads=HEADS, anchor="first", recipe="float32_powers", arithmetic="bfloat16", divisor=math.sqrt(8)
    ),
    "t5/encoder": t5("encoder"),
    "t5/decoder": t5("decoder"),
    "xlnet": RelativeSinusoidConfig(width=48, clamp_len=None, bidirectional=True),
}


def side_of(name: str) -> str | None:
    return name.partition("/")[2] or None


def bias_of(name: str, values: dict[str, Any]) -> BiasConfig | None:
    read = FAMILIES[name].bias
    return read(Config(values)) if read else None


@pytest.mark.parametrize("name", BIASED)
def test_bias_is_read_from_checkpoint_and_from_document(name: str, tmp_path: Path) -> None:
    weights = dict(save(name, tmp_path).named_parameters())
    frontend = FrontEnd.from_data(read_frontend(tmp_path, side_of(name)))
    assert frontend.config.bias == EXPECTED[name]
    state = frontend.state_dict()
    assert ("bias.weight" in state) == name.startswith("t5/")
    if name.startswith("t5/"):
        assert torch.equal(state["bias.weight"], weights[BUCKETS.format(side_of(name))])
    document = json.loads(json.dumps(frontend.config.to_document()))
    assert "weight" not in document["bias"]
    again = type(frontend).from_tensors(FrontEndConfig.from_document(document), state)
    assert again.config.bias == from_document(to_document(EXPECTED[name]))
    lengths = (3, 4) if name == "xlnet" else (2, 3, 4)
    assert torch.equal(again.bias(*lengths), frontend.bias(*lengths))


def test_model_without_bias_has_none(tmp_path: Path) -> None:
    save("falcon", tmp_path, alibi=False)
    frontend = FrontEnd.from_data(read_frontend(tmp_path))
    assert frontend.config.bias is None
    assert frontend.config.to_document()["bias"] is None
    assert not hasattr(frontend, "bias")


def test_missing_bias_values_have_transformers_defaults() -> None:
    assert bias_of("bloom", {}) == AlibiConfig(heads=8, anchor="first", recipe="float32_powers")
    assert bias_of("mpt", {"attn_config": None}) == AlibiConfig(heads=16, anchor="last", recipe="float32_reciprocals")
    assert bias_of("falcon", {}) is None
    assert bias_of("falcon", {"alibi": True}) == AlibiConfig(
        heads=71, anchor="first", recipe="float32_powers", arithmetic="bfloat16", divisor=8.0
    )
    encoder = bias_of("t5/encoder", {})
    assert isinstance(encoder, T5Config)
    assert (encoder.heads, encoder.buckets, encoder.max_distance) == (8, 32, 128)
    assert bias_of("xlnet", {}) == RelativeSinusoidConfig(width=1024, clamp_len=None, bidirectional=True)
    assert bias_of("bert", {}) is None


INVALID: dict[str, list[tuple[dict[str, Any], str]]] = {
    "mpt": [
        ({"attn_config": {"alibi": False}}, "attn_config.alibi is False, understood is True"),
        ({"attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max is 16, understood is 8"),
        ({"attn_config": 3}, "attn_config is 3, understood is an object"),
        ({"n_heads": 0}, "n_heads is 0, understood is 1 or more"),
    ],
    "bloom": [({"num_attention_heads": 4}, "num_attention_heads is 4, understood is 6, as n_head")],
    "falcon": [
        ({"alibi": "yes"}, "alibi is 'yes', understood is True or False"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, understood is 1 or more"),
    ],
    "xlnet": [
        ({"bi_data": True}, "bi_data is True, understood is False"),
        ({"attn_type": "other"}, "attn_type is 'other', understood is 'bi' or 'uni'"),
        ({"clamp_len": 2.5}, "clamp_len: got 2.5, expected 1 or more"),
    ],
    "t5/decoder": [({"num_heads": 2.0}, "num_heads is 2.0, understood is 1 or more")],
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


def test_invalid_bias_document_is_rejected() -> None:
    documents: list[tuple[dict[str, Any], str]] = [
        ({"kind": "rotary"}, "kind: got 'rotary', expected alibi, t5, relative_sinusoid"),
        ({"kind": "alibi"}, "heads"),
        ({"kind": "alibi", "heads": 4, "width": 4}, "width"),
        ({"kind": "alibi", "heads": True}, "heads: got True, expected 1 or more"),
    ]
    for document, message in documents:
        assert message in rejection(ValueError, from_document, document), document
