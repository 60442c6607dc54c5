"""Rotary axes of models with three-dimensional positions, against transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm46VConfig, Glm46VModel

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.rotary_families import find_rotary
from preblock.models.checkpoints.rotary_reader import read_rotary
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding
from preblock.models.modules.rotary_output import RotaryOutput
from tests.families.library_models import in_our_form
from tests.families.published_models import PUBLISHED, token_decoder
from tests.models.checkpoints.rotary_models import config_of, modeling_of, outputs_of
from tests.models.rejections import rejection


@pytest.mark.parametrize(
    ("family", "sections"),
    [
        ("qwen2_vl/text", [16, 40, 8]),
        ("qwen3_vl/text", [24, 20, 20]),
        ("qwen3_vl_moe/text", [24, 20, 20]),
        ("qwen3_5_text", [11, 30, 0]),
        ("qwen3_5_moe/text", [11, 11, 10]),
        ("glm4v/text", [16, 40, 8]),
        ("glm4v_moe/text", [4, 20, 8]),
        ("glm_ocr/text", [16, 8, 8]),
        ("glm46v/text", [16, 40, 8]),
        ("qwen4_exp/text", [24, 20, 20]),
        ("ernie4_5_vl_moe/text", [22, 22, 20]),
    ],
)
def test_axes_are_those_of_transformers(family: str, sections: list[int]) -> None:
    values: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
    values |= {"head_dim": 128} if family == "glm4v_moe/text" else {}  # the default width is odd
    config = config_of(family, values)
    modeling = modeling_of(config)
    (name,) = (name for name in dir(modeling) if re.fullmatch("(?!.*Vision).*RotaryEmbedding", name))
    positions = torch.randint(2000, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    expected = in_our_form(getattr(modeling, name)(config)(torch.zeros(1), positions))
    row = find_rotary(family, values)
    assert row is not None
    (output,) = read_rotary(row, values, config.hidden_size, config.max_position_embeddings)
    module, axes = RotaryEmbedding(output.config), torch.tensor(output.axes * 2)
    for part, wanted in enumerate(expected):
        each = torch.stack([module(ids, position_ids=ids)[part] for ids in positions])
        assert torch.equal(each.gather(0, axes.expand(1, 2, 7, -1))[0], wanted)
    again = RotaryOutput.from_document(json.loads(json.dumps(output.to_document())))
    assert again == output


def test_invalid_sections_and_axes_are_rejected() -> None:
    row = find_rotary("ernie4_5_vl_moe/text", {})
    assert row is not None
    for sections in ([22, 21, 21], [32, 32, 0], [64], [22, 22, 19]):
        values = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
        message = r"mrope_section: got \[.*\], expected (numbers with the sum 64|three numbers)"
        assert re.search(message, rejection(ValueError, read_rotary, row, values, 2560, 64)), sections
    for axes in ((0,), (0, 3), [0, 1]):
        message = f"rotary.axes: got {axes}, expected 2 numbers from 0 to 2, or none"
        assert message in rejection(ValueError, RotaryOutput, config=RotaryConfig(dim=4), axes=axes)


def test_text_part_of_mixed_experts_has_its_own_rotary(tmp_path: Path) -> None:
    part = token_decoder("glm4v_moe_text").config
    model = Glm46VModel(Glm46VConfig(**(PUBLISHED["glm46v/text"].config | {"text_config": part})))
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    document = json.loads(file.read_text())
    del document["text_config"]["max_position_embeddings"]
    file.write_text(json.dumps(document))
    frontend = read_frontend(tmp_path, "text")
    assert frontend.config.max_len == 65536
    (output,) = frontend.config.rotary
    assert (output.layout, output.config.dim, output.axes) == ("half", 4, (0, 1))
    expected = model.language_model.rotary_emb(torch.zeros(1), torch.arange(30, 39).expand(3, 1, 9))
    for found, wanted in zip(outputs_of(frontend, 9, 30).values(), in_our_form(expected), strict=True):
        assert torch.equal(found, wanted)

    document["text_config"]["model_type"] = "llama"
    file.write_text(json.dumps(document))
    message = "model_type is 'llama', understood is 'glm4v_text' or 'glm4v_moe_text'"
    assert message in rejection(CheckpointError, read_frontend, tmp_path, "text")
