"""Rotary outputs of whole checkpoints, against transformers."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.rotary_config import RotaryConfig
from preblock.models.modules.rotary_embedding import RotaryEmbedding, rotate
from tests.models.checkpoints.rotary_models import ROTARY, config_of, modeling_of, outputs_of, tiny
from tests.models.rejections import rejection

ESM = {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 98, "token_dropout": True}


def test_esm_rotary_positions_count_padding(tmp_path: Path) -> None:
    model, seen = tiny(tmp_path, "EsmModel", **ESM), []
    model.rotary_embeddings.register_forward_hook(lambda *arguments: seen.append(arguments[2]))
    ids = torch.tensor([[1, 1, 5, 6], [7, 8, 9, 1]])
    model(input_ids=ids, attention_mask=(ids != 1).long())
    frontend = FrontEnd.from_data(read_frontend(tmp_path))
    assert frontend.config.needs_mask
    ((cos, sin),) = seen
    assert [torch.equal(a, b) for a, b in zip(outputs_of(frontend, 4).values(), (cos, sin), strict=True)] == [True] * 2


@pytest.mark.parametrize("place", ["rotary_embeddings", "encoder.layer.0.attention.self.rotary_embeddings"])
def test_stored_esm_frequencies_override_config(tmp_path: Path, place: str) -> None:
    tiny(tmp_path, "EsmModel", **ESM)
    file = tmp_path / "model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if "inv_freq" not in key}
    narrow = (1.0 / 10000 ** (torch.arange(0, 8, 2) / 8)).half()
    save_file(tensors | {f"{place}.inv_freq": narrow}, file, metadata={"format": "pt"})
    model = transformers.EsmModel.from_pretrained(tmp_path)
    assert model.rotary_embeddings is not None
    expected = model.rotary_embeddings(torch.zeros(1), torch.arange(9).unsqueeze(0))
    frontend = FrontEnd.from_data(read_frontend(tmp_path))
    assert frontend.config.rotary[0].config.scaling == "given"
    assert all(torch.equal(a, b) for a, b in zip(outputs_of(frontend).values(), expected, strict=True))
    again = FrontEndConfig.from_document(json.loads(json.dumps(frontend.config.to_document())))
    assert again.rotary == frontend.config.rotary

    save_file(tensors | {f"{place}.inv_freq": narrow[:3].clone()}, file)
    assert re.search("frequencies: got .*, expected 4 numbers", rejection(CheckpointError, read_frontend, tmp_path))


def test_changed_roformer_table_disables_rotary_outputs(tmp_path: Path) -> None:
    tiny(tmp_path, "RoFormerModel")
    assert read_frontend(tmp_path).config.rotary
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["encoder.embed_positions.weight"] = tensors["encoder.embed_positions.weight"].half()
    save_file(tensors, file)
    config = read_frontend(tmp_path).config
    assert config.rotary == ()
    assert config.no_rotary is not None
    assert "encoder.embed_positions.weight" in config.no_rotary


QUERY = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
COS, SIN = RotaryEmbedding(RotaryConfig(dim=16))(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("family", ["gptj", "codegen", "roformer"])
def test_rotate_matches_transformers(family: str) -> None:
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family == "roformer":
        table = torch.cat((SIN[..., :8], COS[..., :8]), -1)[:, None]
        expected = modeling.RoFormerSelfAttention.apply_rotary_position_embeddings(table, QUERY, QUERY)[0]
    else:
        turned = modeling.apply_rotary_pos_emb(QUERY.transpose(1, 2), SIN[..., :8], COS[..., :8])
        expected = turned.transpose(1, 2)
    assert torch.equal(rotate(QUERY, COS, SIN, ROTARY[family].layout), expected)


# Their attention takes complex numbers, half of the cosines, or the tables of the test above.
OTHERS = {"deepseek_v2", "llama4_text", "gpt_oss", "gptj", "codegen", "roformer"}


@pytest.mark.parametrize("family", sorted({*ROTARY} - OTHERS))
def test_layout_of_row_is_that_of_transformers(family: str) -> None:
    """With cosines of the pairs twice over, or each in two neighbouring columns."""
    modeling, found = modeling_of(config_of(family, {})), rotate(QUERY, COS, SIN, ROTARY[family].layout)
    turn = modeling.apply_rotary_pos_emb
    if hasattr(modeling, "apply_rotary_pos_emb_interleave"):  # it returns the pairs as halves
        turn, found = modeling.apply_rotary_pos_emb_interleave, torch.cat((found[..., 0::2], found[..., 1::2]), -1)
    tables = (COS, SIN), [part[..., :8].repeat_interleave(2, -1) for part in (COS, SIN)]
    if "q" in inspect.signature(turn).parameters:
        turned = [turn(QUERY, QUERY, *pair)[0] for pair in tables]
    else:
        turned = [turn(QUERY, *pair) for pair in tables]
    assert any(torch.equal(found, expected) for expected in turned)


def test_length_dependent_rotary_needs_rotary_length(tmp_path: Path) -> None:
    tiny(tmp_path, "LlamaModel", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    config = read_frontend(tmp_path).config
    assert config.no_rotary == "rope_type 'dynamic' depends on the length of the whole sequence, and none was given"
    assert FrontEndConfig.from_document(config.to_document()).no_rotary == config.no_rotary
    for length in (0, -1):
        message = f"length: got {length}, expected more than 0"
        assert message in rejection(CheckpointError, read_frontend, tmp_path, rotary_length=length)
