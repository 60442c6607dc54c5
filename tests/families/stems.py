"""Tiny image and audio models of transformers, and the input of their first block."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
    WhisperConfig,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
    WhisperModel,
)

BLOCKS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
VIT = ViTConfig(**BLOCKS, image_size=30, patch_size=8, num_channels=2)
CLIP_VISION = CLIPVisionConfig(**BLOCKS, image_size=24, patch_size=6, layer_norm_eps=1e-3)
CLIP = CLIPConfig(vision_config=CLIP_VISION.to_dict(), text_config=CLIPTextConfig(**BLOCKS, vocab_size=20).to_dict())
WHISPER = WhisperConfig(
    d_model=16,
    num_mel_bins=5,
    max_source_positions=7,
    max_target_positions=9,
    vocab_size=30,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
MODELS: dict[str, tuple[type[PreTrainedModel], Any, str | None, str]] = {
    "vit": (ViTModel, VIT, None, "layers.0"),
    "vit head": (ViTForImageClassification, VIT, None, "vit.layers.0"),
    "vit mask": (ViTForMaskedImageModeling, VIT, None, "vit.layers.0"),
    "vision": (CLIPVisionModel, CLIP_VISION, None, "encoder.layers.0"),
    "vision head": (CLIPVisionModelWithProjection, CLIP_VISION, None, "vision_model.encoder.layers.0"),
    "clip": (CLIPModel, CLIP, "vision", "vision_model.encoder.layers.0"),
    "whisper": (WhisperModel, WHISPER, "encoder", "encoder.layers.0"),
    "whisper head": (WhisperForConditionalGeneration, WHISPER, "encoder", "model.encoder.layers.0"),
    "whisper audio": (WhisperForAudioClassification, WHISPER, "encoder", "encoder.layers.0"),
}
"""The class, its config, the side, and the first block."""
ROWS = {"vit": "vit", "vision": "clip_vision_model", "clip": "clip/vision", "whisper": "whisper/encoder"}
"""A model for each row of `STEMS`."""


def build(name: str) -> PreTrainedModel:
    """Return a model of random parameters, including class tokens and biases, which start at zero."""
    kind, config, *_ = MODELS[name]
    torch.manual_seed(1)
    model: PreTrainedModel = kind(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.train(False)
    return model


def save(name: str, folder: Path, **options: Any) -> Path:
    build(name).save_pretrained(folder, **options)
    return folder


class BlockInputFound(Exception):
    """Carries the input of the first block out of a forward pass."""


def entering_block_0(name: str, values: Tensor) -> Tensor:
    """Return the input of the first block of the transformers model; another image size is interpolated."""
    model = build(name)

    def stop(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        raise BlockInputFound(args[0] if args else kwargs["hidden_states"])

    model.get_submodule(MODELS[name][3]).register_forward_pre_hook(stop, with_kwargs=True)
    inputs: dict[str, Any] = {"input_features": values}
    if not name.startswith("whisper"):
        inputs = {"pixel_values": values, "interpolate_pos_encoding": values.shape[-2:] != (size_of(name),) * 2}
    if name == "clip":
        inputs["input_ids"] = torch.zeros((1, 2), dtype=torch.int64)
    try:
        with torch.inference_mode():
            model(**inputs)
    except BlockInputFound as seen:
        entering: Tensor = seen.args[0]
        return entering
    raise AssertionError(f"{name} has no such block")


def size_of(name: str) -> int:
    return 30 if name.startswith("vit") else 24


def sample(name: str, batch: int = 2, size: tuple[int, int] | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if name.startswith("whisper"):
        return torch.randn(batch, 5, 14, generator=generator)
    return torch.randn(batch, 2 if name.startswith("vit") else 3, *(size or (size_of(name),) * 2), generator=generator)
