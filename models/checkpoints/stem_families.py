"""The stem table: published encoders of images or spectrograms, and the Hugging Face names of their tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from preblock import models
from preblock.models.checkpoints.family import Config

if TYPE_CHECKING:
    from preblock.models.modules.stems import StemConfig


@dataclass(frozen=True, kw_only=True)
class StemFamily:
    """One row: an encoder of images or spectrograms.

    Args:
        config: the sizes of the stem, given its name and the config.
        keys: name in `state_dict()` of the stem -> key in a base model's file.
        prefixes: prefixes of the keys in other models' files.
        sections: keys of the part about this model, in the config of several models; the first one found is used.
            Default none, for the whole config.

    """

    config: "Callable[[str, Config], StemConfig]"
    keys: Mapping[str, str]
    prefixes: tuple[str, ...]
    sections: tuple[str, ...] = ()


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


STEMS: dict[str, StemFamily] = {
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
    "whisper/encoder": StemFamily(
        config=lambda name, c: models.AudioConfig(
            family=name,
            width=c("d_model", 384),
            channels=c("num_mel_bins", 80),
            positions=c("max_source_positions", 1500),
        ),
        keys={
            "conv1.weight": "conv1.weight",
            "conv1.bias": "conv1.bias",
            "conv2.weight": "conv2.weight",
            "conv2.bias": "conv2.bias",
            "positions": "embed_positions.weight",
        },
        prefixes=("encoder.", "model.encoder."),
    ),
}
