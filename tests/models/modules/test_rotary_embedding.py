"""Rotary positions, against the corresponding modules of transformers."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj

from preblock.models.modules.rotary_config import SCALINGS, RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from tests.models.modules.published_rotary import (
    CONFIGS,
    EACH,
    EACH_SCALING,
    IDS,
    LENGTHS,
    PUBLISHED,
    PublishedRotary,
    angles,
    assert_equal,
    read,
    some_positions,
)
from tests.models.rejections import rejection


@EACH
def test_rotary_angles_equal_transformers(published: PublishedRotary) -> None:
    new = published.config().to_dict()
    assert "rope_scaling" not in new
    for length in LENGTHS:
        positions, config = some_positions(length), published.read(length)
        assert_equal(angles(RotaryEmbedding(config), positions), published.angles(positions))
        # The library's own spelling reads like the older file.
        assert read(new, length, published.config_class.model_type) == config


@EACH
def test_rotary_angles_in_bfloat16_equal_transformers(published: PublishedRotary) -> None:
    positions = some_positions(5000)
    found = angles(RotaryEmbedding(published.read(5000)), positions, torch.bfloat16)
    assert_equal(found, published.angles(positions, torch.bfloat16))


def test_comparisons_cover_every_rotary_scaling() -> None:
    assert {published.read(1).scaling for published in PUBLISHED.values()} == set(SCALINGS) - {"given", "proportional"}
    assert set(CONFIGS) == set(SCALINGS)


def test_gptj_angles_equal_transformers() -> None:
    values = {"n_embd": 64, "n_head": 4, "rotary_dim": 12, "n_positions": 2048}
    config = read(values, family="gptj")
    sin, cos = modeling_gptj.create_sinusoidal_positions(2048, 12).chunk(2, dim=-1)
    assert config == RotaryConfig(dim=12)
    assert_equal(
        angles(RotaryEmbedding(config), torch.arange(2048).unsqueeze(0)),
        (torch.cat((cos, cos), -1).unsqueeze(0), torch.cat((sin, sin), -1).unsqueeze(0)),
    )


@EACH_SCALING
def test_offset_shifts_rotary_positions(config: RotaryConfig) -> None:
    module = RotaryEmbedding(config)
    whole = module(torch.zeros((1, 50), dtype=torch.int64))
    # A row is independent of its neighbours, and of earlier calls.
    found = module(IDS, offset=torch.tensor([3, 100_000]))
    assert_equal(tuple(part[0] for part in found), tuple(part[0, 3:8] for part in whole))
    for given in ({"offset": 7}, {"position_ids": torch.arange(7, 12).unsqueeze(0)}):
        assert_equal(module(IDS, **given), (whole[0][:, 7:12], whole[1][:, 7:12]))


def test_rotary_angles_are_no_state_and_stay_float32() -> None:
    module = RotaryEmbedding(CONFIGS["llama3"])
    assert (list(module.parameters()), module.state_dict()) == ([], {})
    expected = module(IDS, offset=10_000)
    assert_equal(module(torch.zeros(2, 5, 8), offset=10_000), expected)
    assert_equal(module.to(torch.bfloat16)(IDS, offset=10_000), expected)
    assert_equal(module.double()(IDS, offset=10_000), expected)
    with torch.device("meta"):
        module = RotaryEmbedding(CONFIGS["llama3"])
    assert_equal(module(IDS, offset=10_000), expected)
    assert module.to("meta").frequencies.device.type == "meta"
    assert_equal(module.to_empty(device="cpu")(IDS, offset=10_000), expected)


def test_invalid_rotary_position_is_rejected() -> None:
    for offset in (-1, torch.tensor([3, -1])):
        module = RotaryEmbedding(CONFIGS["default"])
        assert rejection(ValueError, module, IDS, offset=offset) == "offset: got -1, expected 0 or more"
    for scaling in ("dynamic", "longrope"):
        module = RotaryEmbedding(replace(CONFIGS[scaling], length=5000))
        module(IDS, offset=4995)
        assert rejection(ValueError, module, IDS, offset=4996) == "position: got 5000, expected 0 to 4999"
        ids = torch.tensor([[0, 1, 6000, 2, 3]])
        assert rejection(ValueError, module, IDS, position_ids=ids) == "position: got 6000, expected 0 to 4999"


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotate_turns_first_columns_of_head(layout: Literal["half", "interleaved"]) -> None:
    """The library's functions of whole heads are in `test_rotary_outputs.py`."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 48, requires_grad=True), torch.randn(2, 2, 5, 48)
    for offset in (torch.tensor([100]), torch.tensor([0, 100])):
        cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS, offset=offset)
        found = rotate(query, cos, sin, layout), rotate(key, cos, sin, layout)
        if layout == "half":
            library: Any = modeling_gpt_neox
            expected = library.apply_rotary_pos_emb(query, key, cos, sin)
        else:
            parts = (part[..., :32].transpose(1, 2) for part in (query, key))
            turned = [modeling_gptj.apply_rotary_pos_emb(part, sin[..., :16], cos[..., :16]) for part in parts]
            rests = (query[..., 32:], key[..., 32:])
            expected = [torch.cat((a.transpose(1, 2), b), dim=-1) for a, b in zip(turned, rests, strict=True)]
        assert_equal(found, tuple(expected))
    weights = torch.randn(2, 4, 5, 48)
    (found[0] * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None
    torch.testing.assert_close(query.grad, rotate(weights, cos, -sin, layout))
    assert rotate(query.to(torch.bfloat16), cos.to(torch.bfloat16), sin.to(torch.bfloat16)).dtype == torch.bfloat16


def test_invalid_arguments_of_rotate_are_rejected() -> None:
    cos, sin = RotaryEmbedding(CONFIGS["default"])(IDS)
    query = torch.zeros(2, 1, 5, 32)
    expected = "layout: got 'pairs', expected 'half', 'interleaved'"
    assert rejection(ValueError, rotate, query, cos, sin, "pairs") == expected
    expected = "cos: got 32 columns, expected up to the width 16 of a head"
    assert rejection(ValueError, rotate, query[..., :16], cos, sin) == expected
