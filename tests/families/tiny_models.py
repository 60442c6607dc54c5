"""Tiny random checkpoints of any model type of transformers, from its default configuration with small sizes."""

import inspect
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from preblock.export.discovery.library import build_model, model_classes
from preblock.export.discovery.model import is_block_list

VOCABULARY, WIDTH, LONGEST, HEADS, LAYERS = 99, 32, 64, 4, 2
Sizes = tuple[tuple[str, int], ...]
VOCABULARY_SIZES: Sizes = (("(?!.*type_).*vocab_size.*|n_words", VOCABULARY),)
SMALL_SIZES: Sizes = (
    *VOCABULARY_SIZES,
    (".*max_position_embeddings|n_positions|max_seq_len|max_(target|source)_positions|n_ctx|max_length", LONGEST),
    (".*intermediate_size|.*ffn_dim|d_ff|n_inner|dff|mlp_dim|hidden_dim|d_inner|ffn_hidden_size", 64),
    ("linear_num_(key|value)_heads", 2),
    ("mamba_n_heads|mamba_num_heads", 8),
    ("mamba_d_ssm", 64),
    ("mamba_n_groups|n_groups|n_group|topk_group", 1),
    ("q_lora_rank|kv_lora_rank|o_lora_rank", 16),
    ("qk_rope_head_dim|.*head_dim|d_kv|d_head|mamba_d_head|mamba_d_state|state_size|ssm_state_size", WIDTH // HEADS),
    (".*num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num", 2),
    (".*num_attention_heads|n_heads?|num_heads|.*coder_attention_heads|attention_heads", HEADS),
    (".*num_hidden_layers|n_layers?|num_layers|.*coder_layers|depth", LAYERS),
    ("hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|embedding_size|input_embedding_size|word_embed_proj_dim", WIDTH),
    ("num_experts|n_routed_experts|num_local_experts|moe_num_experts", 4),
    ("num_experts_per_tok|num_experts_per_token|moe_k|moe_top_?k", 2),
    ("image_size", 16),
    ("patch_size", 8),
    ("projection_dim|proj_dim", WIDTH),
)
"""Pattern of the name of a size, and its value; the first match counts."""
MOST_PARAMETERS = 50_000_000
EQUAL_HEADS = ((".*num_key_value_heads|linear_num_(key|value)_heads", HEADS), *SMALL_SIZES)
MULTIMODAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
HALF_ROPE = MULTIMODAL_ROPE | {"mrope_section": [1, 1, 0]}
"""For models with a rotary half of a head."""
STATED: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 70, "audio_token_offset": 78},
    "apertus1p5_vision_tokenizer": {"codebook_size": 8, "base_channels": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 4},
    "inkling2_vision": {"text_hidden_size": WIDTH},
    "lilt": {"hidden_size": 48},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 91},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 91},
    "qwen4_exp_text": {
        "ple_layer_ids": [1, 2],
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "eos_token_id": 2,
        "hc_lowrank": 8,
    },
    "step3p7_text": {"sliding_window": 16},
    "wavtokenizer_encoder": {"codebook_dim": WIDTH, "codebook_size": 8, "num_filters": 4},
    "xmod": {"default_language": "en_XX"},
}
"""Values of published files without a default in the library."""
UNSTATED = re.compile("head_dim|num_key_value_heads|num_attention_heads|.*intermediate_size|hidden_size|.*token_id")
"""Required keys of some classes without a default."""
TOKEN_ID = re.compile(r".*(_token_id|_token_index|token_idx|_id|_index)")
HEAD_TABLES = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""Tables of model classes, those with heads first, as in published checkpoints."""


def model_types() -> list[str]:
    """Return all model types with a class."""
    return sorted({name for table in HEAD_TABLES for name in getattr(modeling_auto, table)} & set(CONFIG_MAPPING))


def small_config(
    model_type: str, sizes: Sizes = SMALL_SIZES, complete: bool = False, rope: dict[str, Any] | None = None
) -> Any:
    """Return the default configuration of a type with small sizes.

    Args:
        model_type: the type.
        sizes: patterns and values.
        complete: give a size to keys without a default too.
        rope: value of every key `rope_parameters`; default: the library's.

    """
    kind = CONFIG_MAPPING[model_type]
    return kind(**_small(kind().to_dict(), kind, sizes, complete, rope))


def head_class(model_type: str) -> Any:
    """Return the class of published checkpoints of a type."""
    found = (getattr(modeling_auto, table).get(model_type) for table in HEAD_TABLES)
    kinds = [getattr(transformers, name if isinstance(name, str) else name[0]) for name in found if name]
    return next((kind for kind in kinds if kind.config_class is CONFIG_MAPPING[model_type]), kinds[0])


def save_whole(model_type: str, folder: Path, **choices: Any) -> None:
    """Save a tiny model with random weights: zeros would hide omissions; `choices` as in `small_config`."""
    count = sum(
        value.numel() for value in build_model(head_class(model_type), small_config(model_type, **choices)).parameters()
    )
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters, although its sizes are small")
    torch.manual_seed(0)
    model = head_class(model_type)(small_config(model_type, **choices))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)


def save_without_blocks(model_type: str, folder: Path) -> None:
    """Save a model of default sizes, except for its vocabulary, without the tensors of its blocks."""
    config = small_config(model_type, VOCABULARY_SIZES)
    model = build_model(model_classes(config)[0], config)
    lists = {name for name, module in model.named_modules() if is_block_list(module)}
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(value.shape) * 0.02
        for name, value in model.state_dict().items()
        if value.is_floating_point()
        and value.numel() <= MOST_PARAMETERS
        and not any(name.startswith(f"{path}.") for path in lists)
    }
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")


def _small(
    values: dict[str, Any], kind: Any, sizes: Sizes, complete: bool, rope: dict[str, Any] | None
) -> dict[str, Any]:
    small: dict[str, Any] = {}
    accepted = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", {})}
    for key, value in values.items():
        if key in kind.sub_configs and isinstance(value, dict):
            named = value.get("model_type")
            sub = CONFIG_MAPPING[named] if named and named in CONFIG_MAPPING else kind.sub_configs[key]
            small[key] = _small(value, sub, sizes, complete, rope) | ({"model_type": named} if named else {})
        elif key == "rope_parameters" and rope:
            small[key] = deepcopy(rope)  # the library changes it
        elif type(value) is int and key in accepted:
            size = next((size for pattern, size in sizes if re.fullmatch(pattern, key)), None)
            if size is not None:
                small[key] = size
            elif TOKEN_ID.fullmatch(key) and value >= VOCABULARY:
                small[key] = VOCABULARY - 4 - sum(map(ord, key)) % 20
        elif value is None and complete and key in accepted and UNSTATED.fullmatch(key):
            small[key] = next((size for pattern, size in sizes if re.fullmatch(pattern, key)), 1)
    return small | STATED.get(kind.model_type, {})
