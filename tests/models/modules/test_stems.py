"""Stems, and the reader of their checkpoints, against what enters the first block of transformers' own models."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from preblock.models.checkpoints.family_lookup import is_stem, section_of
from preblock.models.checkpoints.stem_reader import read_stem
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.families import STEMS
from preblock.models.families.published_config import Config
from preblock.models.modules.stems import KINDS, AudioConfig, AudioStem, PatchConfig, PatchStem, Stem
from preblock.models.serialization import config_of, to_document
from tests.families.stems import MODELS, build, entering_block_0, sample, save
from tests.models.rejections import rejection


def found(folder: Path, name: str, values: Tensor) -> Tensor:
    with torch.inference_mode():
        vectors: Tensor = read_stem(folder, MODELS[name][2]).eval()(values)
    return vectors


@pytest.mark.parametrize("name", MODELS)
def test_saved_stem_equals_transformers_block_0_input(name: str, tmp_path: Path) -> None:
    _, config, side, _ = MODELS[name]
    folder = save(name, tmp_path)
    assert is_stem(json.loads((folder / "config.json").read_text()), side)
    assert (f"{config.model_type}/{side}" if side else config.model_type) in STEMS
    for batch in (1, 3):
        values = sample(name, batch)
        assert torch.equal(found(folder, name, values), entering_block_0(name, values))
    signature = read_stem(folder, side).signature
    signature.check(values.shape)
    assert (signature.length(*values.shape[2:]), signature.width) == found(folder, name, values).shape[1:]
    assert signature.input == ("input_features" if name.startswith("whisper") else "pixel_values")
    assert not signature.exact


def test_image_stem_at_other_sizes_equals_transformers(tmp_path: Path) -> None:
    folder = save("vit", tmp_path)
    for size in ((8, 8), (88, 8), (24, 32)):
        values = sample("vit", size=size)
        assert torch.equal(found(folder, "vit", values), entering_block_0("vit", values)), size


def test_stem_reader_needs_no_other_tensors(tmp_path: Path) -> None:
    folder, values = save("clip", tmp_path), sample("clip")
    expected = found(folder, "clip", values)
    tensors = load_file(folder / "model.safetensors")
    kept = {key for key in tensors if key.startswith(("vision_model.embeddings.", "vision_model.pre_layrnorm."))}
    save_file({key: tensors[key] for key in kept}, folder / "model.safetensors")
    assert torch.equal(found(folder, "clip", values), expected)
    for key in sorted(kept):
        save_file({other: tensors[other] for other in kept - {key}}, folder / "model.safetensors")
        assert re.search(f"no tensor .*{key}", rejection(CheckpointError, read_stem, folder, "vision"))


def test_narrow_stem_weights_are_widened_to_float32(tmp_path: Path) -> None:
    model = build("vit")
    for dtype in (torch.bfloat16, torch.float16):
        nn.Module.to(model, dtype).save_pretrained(tmp_path)
        stem = read_stem(tmp_path)
        assert {tensor.dtype for tensor in stem.state_dict().values()} == {torch.float32}
        assert torch.equal(stem.positions, model.get_parameter("embeddings.position_embeddings")[0].float())


def test_standalone_encoder_checkpoint_is_read(tmp_path: Path) -> None:
    model, values = build("whisper"), sample("whisper")
    model.get_submodule("encoder").save_pretrained(tmp_path)  # type: ignore[operator]
    assert "conv1.weight" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(found(tmp_path, "whisper", values), entering_block_0("whisper", values))


def test_absent_config_keys_take_library_defaults() -> None:
    for row, family in STEMS.items():
        library = section_of(CONFIG_MAPPING[row.partition("/")[0]]().to_dict(), family.sections)
        assert family.config(row, Config({})) == family.config(row, Config(library)), row


def change(folder: Path, **values: Any) -> None:
    """Change keys of `config.json`; `...` removes one."""
    config = json.loads((folder / "config.json").read_text()) | values
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


INVALID: dict[str, list[tuple[dict[str, Any], str]]] = {
    "vit": [
        ({"image_size": [30, 40]}, r"config\.json: image_size: got \[30, 40\], expected one number"),
        ({"patch_size": [8, 4]}, r"config\.json: patch_size: got \[8, 4\]"),
        ({"patch_size": 31}, r"patch_size: got 31, expected 1 to 30"),
        ({"patch_size": "8"}, r"patch_size: got '8'"),
        ({"image_size": 0}, r"image_size: got 0"),
        ({"image_size": 64}, r"disagree: .*positions.*\[10, 16\].*\[65, 16\]"),
        ({"num_channels": 3}, r"disagree: .*patches\.weight"),
        ({"model_type": "deit"}, r"model_type is 'deit'.*known are vit, clip_vision_model"),
    ],
    "vision": [({"layer_norm_eps": -1.0}, r"norm_eps: got -1\.0")],
    "whisper": [
        ({"num_mel_bins": 80}, r"disagree: .*conv1\.weight"),
        ({"max_source_positions": 1500}, r"disagree: .*positions"),
        ({"d_model": 2.5}, r"width: got 2\.5"),
        ({"d_model": 10**9}, r"disagree: .*overflow"),
    ],
    "clip": [
        ({"vision_config_dict": {"layer_norm_eps": -2.0}}, r"norm_eps: got -2\.0"),  # it precedes vision_config
        ({"vision_config": ...}, r"vision_config is missing"),
        ({"vision_config": [1]}, r"vision_config is \[1\]"),
    ],
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_stem_config_value_is_rejected(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    valid = (folder / "config.json").read_text()
    for values, message in INVALID[name]:
        (folder / "config.json").write_text(valid)
        change(folder, **values)
        assert re.search(message, rejection(CheckpointError, read_stem, folder, MODELS[name][2])), values


@pytest.mark.parametrize(
    ("name", "side"), [("vit", "vision"), ("clip", None), ("clip", "text"), ("whisper", "decoder")]
)
def test_unknown_stem_side_is_rejected(name: str, side: str | None, tmp_path: Path) -> None:
    assert f"side {side!r}, known are" in rejection(CheckpointError, read_stem, save(name, tmp_path), side)


# The modules.

PATCHES = PatchConfig(family="own", width=8, channels=3, image_size=12, patch_size=4, norm_eps=1e-5)
AUDIO = AudioConfig(family="own", width=8, channels=4, positions=6)
STEM_OF: dict[str, Stem] = {"patches": PatchStem(PATCHES), "audio": AudioStem(AUDIO)}


def test_stem_documents_round_trip_or_are_rejected() -> None:
    for config in (PATCHES, AUDIO, replace(PATCHES, norm_eps=None, bias=False)):
        assert config_of(json.loads(json.dumps(to_document(config))), KINDS) == config
    for document, message in (
        ({"kind": "text"}, "kind: got 'text', expected patches, audio"),
        ({"kind": "audio", "family": "a", "width": 1, "channels": 1}, "audio.positions: got none"),
        (to_document(AUDIO) | {"color": 1}, "audio.color is not known"),
        (to_document(AUDIO) | {"positions": True}, "positions: got True"),
        (to_document(PATCHES) | {"bias": 1}, "bias: got 1"),
    ):
        assert re.search(message, rejection(ValueError, config_of, document, KINDS)), document


def test_stem_input_with_wrong_shape_is_rejected() -> None:
    for kind, shape, message in (
        ("patches", (1, 4, 12, 12), "pixel_values: got shape (1, 4, 12, 12), expected (batch, 3, height, width)"),
        ("patches", (3, 12, 12), "pixel_values: got shape"),
        ("patches", (1, 3, 14, 12), "pixel_values: got height 14 and width 12, expected multiples of 4"),
        ("patches", (1, 3, 12, 3), "got height 12 and width 3"),
        ("patches", (1, 3, 0, 12), "got height 0 and width 12"),
        ("audio", (1, 5, 12), "input_features: got shape (1, 5, 12), expected (batch, 4, 12)"),
        ("audio", (1, 4, 13), "input_features: got shape"),
        ("audio", (1, 4, 11), "input_features: got shape"),
    ):
        assert message in rejection(ValueError, STEM_OF[kind], torch.zeros(shape)), shape


def test_square_size_as_pair_is_read(tmp_path: Path) -> None:
    folder, values = save("vit", tmp_path), sample("vit")
    change(folder, image_size=[30, 30], patch_size=[8, 8])
    assert torch.equal(found(folder, "vit", values), entering_block_0("vit", values))
