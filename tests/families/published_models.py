"""Classes of transformers and tiny configurations, for every family."""

from dataclasses import dataclass
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from preblock.models.families import FAMILIES
from tests.families import gemma3n
from tests.families.tiny_models import EQUAL_HEADS, HALF_ROPE, MULTIMODAL_ROPE, SMALL_SIZES, small_config

VOCABULARY, WIDTH, LONGEST = 99, 32, 64


@dataclass(frozen=True)
class Published:
    """A class of transformers, the configuration of a tiny model, and the place of its first block.

    `rotary` is its rotary module, or the table of sines and cosines in its attention.
    """

    model: str
    config: dict[str, Any]
    block: str
    rotary: str = ""


def _sized(width: str, heads: str, layers: str, longest: str = "", **others: Any) -> dict[str, Any]:
    """Return a tiny configuration, given the names of its sizes."""
    named = {"vocab_size": VOCABULARY, width: WIDTH, heads: 4, layers: 2} | ({longest: LONGEST} if longest else {})
    return named | others


_PLACES, _ENDS = "max_position_embeddings", {"bos_token_id": 1, "eos_token_id": 2}
_ENCODER = _sized("hidden_size", "num_attention_heads", "num_hidden_layers", _PLACES, intermediate_size=37)
_ROTARY = _ENCODER | {"num_key_value_heads": 2, "pad_token_id": 0}
_GPT = _sized("n_embd", "n_head", "n_layer", "n_positions", **_ENDS)
_BOTH = _sized("d_model", "encoder_attention_heads", "encoder_layers", encoder_ffn_dim=37, scale_embedding=True)
_BOTH |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 37, "pad_token_id": 1}
_BOTH |= {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
_SEQUENCES, _LISTENER = _BOTH | {_PLACES: LONGEST}, _BOTH | {"max_target_positions": LONGEST}
_T5 = _sized("d_model", "num_heads", "num_layers", d_kv=8, d_ff=37)


def _group(names: tuple[str, ...], *row: Any) -> dict[str, Published]:
    return {name: Published(str(MODEL_MAPPING_NAMES[name]), *row) for name in names}


def _sides(families: tuple[str, ...], config: dict[str, Any], block: str = "layers.0") -> dict[str, Published]:
    return {
        f"{family}/{side}": Published(str(MODEL_MAPPING_NAMES[family]), config, f"{side}.{block}")
        for family in families
        for side in ("encoder", "decoder")
    }


def token_decoder(name: str) -> Published:
    """Return a tiny model of a type from its default configuration."""
    equal = name in ("mamba2", "sarvam_mla") or name.startswith("deepseek")
    sizes = (("num_heads", 8), *EQUAL_HEADS) if equal else SMALL_SIZES
    complete, rope = name.startswith(("hunyuan", "nemotron")), THREE_AXES.get(name)
    config: dict[str, Any] = small_config(name, sizes, complete, rope).to_dict()
    if name == "deepseek_v2":
        config["num_experts_per_tok"] = 2
    multiplier = {"embedding_multiplier": 12.5} if "embedding_multiplier" in config else {}
    rope = {"position_embedding_type": "rope"} if name == "granitemoehybrid" else {}
    # The cache of hybrids cannot be made for two layers.
    config |= multiplier | rope | {"use_cache": False}
    block, rotary = "blocks.0" if name == "rwkv" else "layers.0", "rotary_emb" if FAMILIES[name].rotary else ""
    return Published(str(MODEL_MAPPING_NAMES[name]), config, block, rotary)


def _vision_language(name: str) -> Published:
    """Return a tiny model of texts and images."""
    rope = MULTIMODAL_ROPE | ({"mrope_section": [1, 1, 2]} if name.startswith("ernie") else {})
    config = small_config(name, rope=rope if name in VISION_LANGUAGE else None).to_dict()
    config["text_config"]["use_cache"] = False
    # A quarter or a half of the head turns.
    heads = {"qwen3_5": 32, "qwen3_5_moe": 32, "glm4v_moe": 16}
    config["text_config"] |= {"head_dim": heads[name]} if name in heads else {}
    return Published(str(MODEL_MAPPING_NAMES[name]), config, "language_model.layers.0", f"language_model.{MODULE}")


LAYER, MODULE = "encoder.layer.0", "rotary_emb"
VISION_LANGUAGE = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("glm4v", "glm4v_moe", "glm46v", "glmga", "glm_ocr", "ernie4_5_vl_moe"),
)
"""Models of texts and images, with positions of three axes."""
GEMMA4 = ("gemma4", "gemma4_unified")
THREE_AXES = {"glm4v_text": MULTIMODAL_ROPE, "glm4v_moe_text": HALF_ROPE, "glm_ocr_text": MULTIMODAL_ROPE}
"""Text parts with positions of three axes, and their tiny `rope_parameters`."""
_CLIP_VISION = {key: value for key, value in _ENCODER.items() if key != "vocab_size"} | {
    "image_size": 8,
    "patch_size": 4,
}
_SINGLE = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "cls", "sep")}
_SLIDING = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
PUBLISHED: dict[str, Published] = {
    **_group(("bert", "roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet"), _ENCODER, LAYER),
    "distilbert": Published(
        "DistilBertModel", _sized("dim", "n_heads", "n_layers", _PLACES, hidden_dim=37), "transformer.layer.0"
    ),
    "electra": Published("ElectraModel", _ENCODER | {"embedding_size": 16}, LAYER),
    "albert": Published("AlbertModel", _ENCODER | {"embedding_size": 16}, "encoder.albert_layer_groups.0"),
    "rembert": Published("RemBertModel", _ENCODER | {"input_embedding_size": 16} | _ENDS, LAYER),
    "big_bird": Published(
        "BigBirdModel", _ENCODER | {"attention_type": "original_full", "rescale_embeddings": True}, LAYER
    ),
    "megatron-bert": Published("MegatronBertModel", _ENCODER, LAYER),
    "fnet": Published("FNetModel", {k: v for k, v in _ENCODER.items() if k != "num_attention_heads"}, LAYER),
    "deberta-v2": Published("DebertaV2Model", _ENCODER | {"embedding_size": 16, "type_vocab_size": 2}, LAYER),
    "esm": Published(
        "EsmModel",
        _ENCODER | {"pad_token_id": 1, "mask_token_id": 98, "token_dropout": True, "emb_layer_norm_before": True},
        LAYER,
    ),
    "roformer": Published("RoFormerModel", _ENCODER | {"embedding_size": 16}, LAYER, "encoder.embed_positions.weight"),
    "nomic_bert": Published("NomicBertModel", _ENCODER, "layers.0", MODULE),
    "modernbert": Published("ModernBertModel", _ENCODER | _SINGLE, "layers.0", MODULE),
    "funnel": Published(
        "FunnelBaseModel",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_head": 4, "d_head": 8, "d_inner": 37, "block_sizes": [1, 1]},
        "encoder.blocks.0.0",
    ),
    "xlm": Published("XLMModel", _sized("emb_dim", "n_heads", "n_layers", _PLACES), "attentions.0"),
    "xlnet": Published("XLNetModel", _sized("d_model", "n_head", "n_layer", d_inner=37), "layer.0"),
    "clip_text_model": Published("CLIPTextModel", _ENCODER | _ENDS, "encoder.layers.0"),
    "clip/text": Published(
        "CLIPModel", {"text_config": _ENCODER | _ENDS, "vision_config": _CLIP_VISION}, "text_model.encoder.layers.0"
    ),
    "gpt2": Published("GPT2Model", _GPT, "h.0"),
    "gpt_neo": Published(
        "GPTNeoModel",
        _sized("hidden_size", "num_heads", "num_layers", _PLACES, attention_types=[[["global", "local"], 1]], **_ENDS),
        "h.0",
    ),
    "gpt_bigcode": Published("GPTBigCodeModel", _GPT, "h.0"),
    "openai-gpt": Published("OpenAIGPTModel", _GPT, "h.0"),
    **_group(("gptj", "codegen"), _GPT | {"rotary_dim": 4}, "h.0", "rotary_emb.embed_positions"),
    "ctrl": Published("CTRLModel", _GPT | {"dff": 37}, "h.0"),
    "opt": Published("OPTModel", _ENCODER | {"ffn_dim": 37, "word_embed_proj_dim": 16}, "decoder.layers.0"),
    "biogpt": Published("BioGptModel", _ENCODER, "layers.0"),
    "xglm": Published("XGLMModel", _sized("d_model", "attention_heads", "num_layers", _PLACES, ffn_dim=37), "layers.0"),
    "bloom": Published("BloomModel", _sized("hidden_size", "n_head", "n_layer"), "h.0"),
    "mpt": Published(
        "MptModel", _sized("d_model", "n_heads", "n_layers", "max_seq_len", expansion_ratio=2), "blocks.0"
    ),
    "falcon": Published(
        "FalconModel",
        _sized("hidden_size", "num_attention_heads", "num_hidden_layers", _PLACES, **_ENDS),
        "h.0",
        MODULE,
    ),
    **_group(("llama", "mistral", "qwen2", "qwen3", "phi"), _ROTARY, "layers.0", MODULE),
    "phi3": Published("Phi3Model", _ROTARY | _ENDS, "layers.0", MODULE),
    "gpt_neox": Published("GPTNeoXModel", _ENCODER, "layers.0", MODULE),
    "granite": Published("GraniteModel", _ROTARY | {"embedding_multiplier": 12.5}, "layers.0", MODULE),
    **_group(("gemma", "gemma2"), _ROTARY | {"head_dim": 8}, "layers.0", MODULE),
    "gemma3_text": Published("Gemma3TextModel", _ROTARY | _SLIDING, "layers.0", MODULE),
    "gemma3n_text": Published("Gemma3nTextModel", gemma3n.SIZES, "layers.0", MODULE),
    "gemma3n/text": Published("Gemma3nModel", gemma3n.WHOLE, "language_model.layers.0", f"language_model.{MODULE}"),
    **{f"{name}/text": _vision_language(name) for name in VISION_LANGUAGE},
    **{f"{name}/text": _vision_language(name) for name in (*GEMMA4, "qwen4_exp")},
    **_sides(("bart", "mbart", "blenderbot", "blenderbot-small", "marian", "pegasus", "m2m_100"), _SEQUENCES),
    "speech_to_text/decoder": Published(
        "Speech2TextModel",
        _LISTENER | {"max_source_positions": 64, "input_feat_per_channel": 8, "conv_channels": 16},
        "decoder.layers.0",
    ),
    "whisper/decoder": Published(
        "WhisperModel", _LISTENER | {"max_source_positions": 8, "num_mel_bins": 8}, "decoder.layers.0"
    ),
    **_sides(("t5",), _T5, "block.0"),
}
for _name in FAMILIES:
    if _name.partition("/")[0] not in CONFIG_MAPPING:
        raise ValueError(f"the row {_name}: transformers {transformers.__version__} has no such type to compare with")
PUBLISHED |= {name: token_decoder(name) for name in FAMILIES if "/" not in name and name not in PUBLISHED}
