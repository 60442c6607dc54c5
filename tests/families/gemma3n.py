"""Gemma 3n of transformers with an image tower of its own, because the published one needs timm."""

from typing import Any, ClassVar

import transformers
from torch import nn


class ImageConfig(transformers.Gemma3nVisionConfig):  # type: ignore[no-untyped-call]
    """The configuration of an image tower without timm."""

    model_type = "image_tower_of_tests"


class ImageTower(transformers.PreTrainedModel):  # type: ignore[no-untyped-call]
    """An image tower that no text goes through."""

    config_class = ImageConfig

    def __init__(self, config: ImageConfig) -> None:
        super().__init__(config)
        self.project = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()  # type: ignore[no-untyped-call]


class WholeConfig(transformers.Gemma3nConfig):  # type: ignore[no-untyped-call]
    """The configuration of Gemma 3n with this image tower."""

    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        **transformers.Gemma3nConfig.sub_configs_defaults,
        "vision_config": ImageConfig,
    }


class Gemma3nModel(transformers.Gemma3nModel):  # type: ignore[no-untyped-call]
    """Gemma 3n with this image tower; everything else is the library's."""

    config_class = WholeConfig


transformers.AutoModel.register(ImageConfig, ImageTower)

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 16,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "activation_sparsity_pattern": [0.5, 0.0, 0.0],
    "use_cache": False,
}
WHOLE: dict[str, Any] = {
    "text_config": SIZES,
    "vision_config": {"hidden_size": 16, "vocab_size": 4, "vocab_offset": 91},
    "audio_config": {
        "vocab_size": 4,
        "vocab_offset": 95,
        "hidden_size": 16,
        "conf_num_hidden_layers": 1,
        "conf_num_attention_heads": 2,
        "sscp_conv_channel_size": [4, 4],
    },
    "image_token_id": 91,
    "audio_token_id": 95,
}
