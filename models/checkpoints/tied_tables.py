"""Names of other tables that the library ties to the token table; a file may hold it under one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from preblock.models.checkpoints.family import Config
from preblock.models.serialization import Keys
from preblock.models.steps import Step, Tokens

HEAD, SHARED = "lm_head.weight", "shared.weight"
HEADS: Mapping[str, str] = {
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet", "esm"), "lm_head.decoder.weight"
    ),
    **dict.fromkeys(
        ("bert", "big_bird", "megatron-bert", "fnet", "deberta-v2", "roformer", "nomic_bert"),
        "cls.predictions.decoder.weight",
    ),
    "albert": "predictions.decoder.weight",
    "biogpt": "output_projection.weight",
    "distilbert": "vocab_projector.weight",
    "electra": "generator_lm_head.weight",
    "modernbert": "decoder.weight",
    "rwkv": "head.weight",
    "whisper": "proj_out.weight",
    "xlm": "pred_layer.proj.weight",
    "xlnet": "lm_loss.weight",
}
"""Model type -> name of the head's table, if it is another than `HEAD`."""
TIED = {
    *(name for name in HEADS if name != "rwkv"),
    *("bloom", "cohere", "cohere2", "ctrl", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe", "falcon", "falcon_mamba"),
    *("funnel", "gemma", "gemma2", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
    *("gemma4_unified", "gemma4_unified_text", "gpt2", "gpt_bigcode", "gpt_neo", "mamba", "mpt", "openai-gpt", "opt"),
    *("smollm3", "speech_to_text", "starcoder2", "xglm"),
}
"""Model types with `tie_word_embeddings` true by default in transformers."""
UNTIED = {"clip", "clip_text_model", "glm4v_moe_text", "glm4v_text", "glm_ocr_text", "nemotron_h", "rembert"}
"""Model types without a head in the library, or with a head never tied."""


def with_tied(steps: Sequence[Step], name: str, config: Config) -> list[Step]:
    """Return `steps` with the names of tied tables as further names of the token table, used if it is missing.

    Args:
        steps: of the row, the token table first.
        name: of the row of the family table.
        config: all of `config.json`.

    """
    tokens, *others = steps
    assert isinstance(tokens, Tokens)
    return [replace(tokens, weight=(*tokens.weight, *_tied_keys(tokens, name, config))), *others]


def _tied_keys(tokens: Tokens, name: str, config: Config) -> Keys:
    """Return the names of the tables tied to the token table, in the order of the library's choice."""
    model_type, _, side = name.partition("/")
    head = HEADS.get(model_type, HEAD)
    if SHARED in tokens.weight:
        other = f"{'decoder' if side == 'encoder' else 'encoder'}.embed_tokens.weight"
        return (other, head) if model_type == "t5" else (head, other)
    if side == "encoder" or model_type in UNTIED or not config("tie_word_embeddings", model_type in TIED):
        return ()
    return (head,)
