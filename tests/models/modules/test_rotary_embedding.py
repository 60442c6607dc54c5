"""Rotary positions, against the corresponding modules of transformers."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.gptj import modeling_gptj

from preblock.models.modules.positions import LearnedPositionalEncoding
from preblock.models.modules.rotary_config import SCALINGS, RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding
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


@EACH
@LENGTHS
def test_rotary_angles_equal_transformers(published: PublishedRotary, length: int) -> None:
    positions = some_positions(length)
    module = RotaryEmbedding(published.read(length))
    assert_equal(angles(module, positions), published.angles(positions))


@EACH
def test_rotary_angles_in_bfloat16_equal_transformers(published: PublishedRotary) -> None:
    positions = some_positions(5000)
    found = angles(RotaryEmbedding(published.read(5000)), positions, torch.bfloat16)
    assert_equal(found, published.angles(positions, torch.bfloat16))


@EACH
@LENGTHS
def test_transformers_5_config_reads_like_older_config(published: PublishedRotary, length: int) -> None:
    new = published.config().to_dict()
    assert "rope_scaling" not in new
    assert read(new, length, published.config_class.model_type) == published.read(length)


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
    assert_equal(module(IDS, offset=7), (whole[0][:, 7:12], whole[1][:, 7:12]))
    found = module(IDS, offset=torch.tensor([3, 45]))
    for row, start in enumerate((3, 45)):
        assert_equal(tuple(part[row] for part in found), tuple(part[0, start : start + 5] for part in whole))


@EACH_SCALING
def test_row_is_independent_of_neighbours_and_earlier_calls(config: RotaryConfig) -> None:
    module, far = RotaryEmbedding(config), torch.tensor([3, 100_000])
    near = RotaryEmbedding(config)(IDS, offset=3)
    assert_equal(tuple(part[:1] for part in module(IDS, offset=far)), near)
    assert_equal(module(IDS, offset=3), near)


def test_rotary_embedding_shares_position_call_signature() -> None:
    found, expected = (
        inspect.signature(kind.forward).parameters for kind in (RotaryEmbedding, LearnedPositionalEncoding)
    )
    assert found == expected


def test_rotary_angles_are_equal_for_ids_and_vectors() -> None:
    module = RotaryEmbedding(CONFIGS["default"])
    assert_equal(module(torch.zeros(2, 5, 8)), module(IDS))


def test_rotary_embedding_has_no_parameters_or_state() -> None:
    module = RotaryEmbedding(CONFIGS["default"])
    assert list(module.parameters()) == []
    assert module.state_dict() == {}


def test_rotary_angles_ignore_dtype_cast() -> None:
    module = RotaryEmbedding(CONFIGS["default"])
    far = module(IDS, offset=10_000)
    assert_equal(module.to(torch.bfloat16)(IDS, offset=10_000), far)
    assert_equal(module.double()(IDS, offset=10_000), far)


def test_rotary_frequencies_are_filled_after_meta_device() -> None:
    expected = RotaryEmbedding(CONFIGS["llama3"])(IDS)
    with torch.device("meta"):
        module = RotaryEmbedding(CONFIGS["llama3"])
    assert_equal(module(IDS), expected)
    assert module.to("meta").frequencies.device.type == "meta"
    assert_equal(module.to_empty(device="cpu")(IDS), expected)


@pytest.mark.parametrize("offset", [-1, torch.tensor([3, -1])])
def test_rotary_negative_offset_is_rejected(offset: int | Tensor) -> None:
    with pytest.raises(ValueError, match="offset: got -1, expected 0 or more"):
        RotaryEmbedding(CONFIGS["default"])(IDS, offset=offset)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_position_beyond_length_is_rejected_with_length_scaling(scaling: str) -> None:
    module = RotaryEmbedding(replace(CONFIGS[scaling], length=5000))
    module(IDS, offset=4995)
    with pytest.raises(ValueError, match="position: got 5000, expected 0 to 4999"):
        module(IDS, offset=4996)
    with pytest.raises(ValueError, match="position: got 6000, expected 0 to 4999"):
        module(IDS, position_ids=torch.tensor([[0, 1, 6000, 2, 3]]))
