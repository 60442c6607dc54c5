"""Rows of CLIP and ViT: encoders of images, and the encoder of texts of CLIP."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from preblock import models
from preblock.models.families.family import Family, StemFamily, absolute
from preblock.models.families.named_steps import learned_position_step, token_step
from preblock.models.families.published_config import Config

if TYPE_CHECKING:
    from preblock.models.modules.stems import StemConfig

_CLIP_TEXT = absolute(
    lambda _: [token_step("embeddings.token_embedding"), learned_position_step("embeddings.position_embedding")],
    "text_model.",
    None,
)

CLIP: dict[str, Family] = {
    "clip_text_model": _CLIP_TEXT,
    # In old files, the second part takes precedence.
    "clip/text": replace(_CLIP_TEXT, sections=("text_config_dict", "text_config")),
}


def _square(key: str, value: Any) -> Any:
    """Return the side of a square, given by one number or by height and width."""
    if not isinstance(value, list):
        return value
    if len(value) != 2 or value[0] != value[1]:
        raise ValueError(f"{key}: got {value}, expected one number, or height and width that are equal")
    return value[0]


def _patches(patch_size: int, **values: Any) -> "Callable[[str, Config], StemConfig]":
    """A stem of images, given the library's default; `values` may depend on the config."""
    return lambda name, c: models.PatchConfig(
        family=name,
        width=c("hidden_size", 768),
        channels=c("num_channels", 3),
        image_size=_square("image_size", c("image_size", 224)),
        patch_size=_square("patch_size", c("patch_size", patch_size)),
        **{key: value(c) if callable(value) else value for key, value in values.items()},
    )


def _clip_vision(*sections: str) -> StemFamily:
    return StemFamily(
        config=_patches(32, bias=False, norm_eps=lambda c: c("layer_norm_eps", 1e-5)),
        keys={
            "class_token": "embeddings.class_embedding",
            "patches.weight": "embeddings.patch_embedding.weight",
            "positions": "embeddings.position_embedding.weight",
            # The library's spelling.
            "norm.weight": "pre_layrnorm.weight",
            "norm.bias": "pre_layrnorm.bias",
        },
        prefixes=("vision_model.",),
        sections=sections,
    )


IMAGE_STEMS: dict[str, StemFamily] = {
    "vit": StemFamily(
        config=_patches(16),
        keys={
            "class_token": "embeddings.cls_token",
            "patches.weight": "embeddings.patch_embeddings.projection.weight",
            "patches.bias": "embeddings.patch_embeddings.projection.bias",
            "positions": "embeddings.position_embeddings",
        },
        prefixes=("vit.",),
    ),
    "clip_vision_model": _clip_vision(),
    # In old files, the second part takes precedence.
    "clip/vision": _clip_vision("vision_config_dict", "vision_config"),
}
