"""Rows of Qwen: texts, texts with images, and n-gram embeddings."""

from collections.abc import Callable
from dataclasses import replace

from preblock.models.families.decoders import decoder, text_side
from preblock.models.families.family import UNTIED, WHOLE, Family
from preblock.models.families.named_steps import count, weight_keys
from preblock.models.families.published_config import Config
from preblock.models.families.rotary import Rotary, part_of_head, theta
from preblock.models.modules.ngram_config import NgramConfig

MAX_SHARDS = 2**16
"""Most parts of a table of n-grams in a checkpoint."""


def _qwen_ngrams(path: str) -> Callable[[Config], NgramConfig | None]:
    """Return the n-gram embeddings of a config, for tensors below `path`; none without such layers."""

    def read(c: Config) -> NgramConfig | None:
        layers = sorted({layer - 1 for layer in c("ple_layer_ids", [])})
        if not layers:
            return None
        end = c("eos_token_id")
        shards = count(c, 512, "split_ngram_parts", MAX_SHARDS)
        tables = [f"{path}layers.{layer}.ple.ple_embedding.ngram_embedding" for layer in layers]
        return NgramConfig(
            layers=tuple(layers),
            size=c("ngram_size", 3),
            heads=c("heads_per_ngram", 8),
            width=c("ple_embed_dim", c("hidden_size", 2048)),
            base=c("ngram_vocab_size_base", 20_000_000),
            multiple=c("make_ngram_vocab_size_divisible_by", 128),
            seed=c("seed", 1234),
            reset_id=end[0] if isinstance(end, list) and end else end,
            # One tensor in a file of a running model, several in a published one.
            weights=tuple(
                (weight_keys(table), *(weight_keys(f"{table}.shard_{shard}") for shard in range(shards)))
                for table in tables
            ),
        )

    return read


_VL = Rotary(heads=64, thetas=theta(1_000_000.0), sections=(16, 24, 24), aliases={"mrope": "default"}, strict=True)
_VL3 = Rotary(heads=32, head_dim=128, thetas=theta(500_000.0), sections=(24, 20, 20), order="mixed")
_ROTARY3_5 = Rotary(heads=16, head_dim=256, share=part_of_head(0.25), sections=(11, 11, 10), order="mixed", strict=True)


def _qwen4(path: str, *sections: str) -> Family:
    return replace(
        decoder(32768, UNTIED, replace(_ROTARY3_5, share=part_of_head(1.0), strict=False), f"{path}embed_tokens"),
        ngrams=_qwen_ngrams(path),
        copies=lambda c: c("hc_count", 4),
        sections=sections,
    )


QWEN: dict[str, Family] = {
    "qwen2": decoder(32768, UNTIED, Rotary(heads=32, strict=True)),
    "qwen2_moe": decoder(32768, UNTIED, Rotary(heads=16, strict=True)),
    "qwen3": decoder(32768, UNTIED, Rotary(heads=32, head_dim=128, strict=True)),
    "qwen3_moe": decoder(32768, UNTIED, Rotary(heads=32)),
    "qwen3_next": decoder(32768, UNTIED, Rotary(heads=16, head_dim=256, share=part_of_head(0.25), strict=True)),
    "qwen3_5_text": decoder(32768, UNTIED, _ROTARY3_5),
    "qwen3_5_moe_text": decoder(32768, UNTIED, _ROTARY3_5),
    # Older files have no object `text_config`, and its values beside the others.
    "qwen2_vl/text": text_side(32768, UNTIED, _VL, WHOLE),
    "qwen2_5_vl/text": text_side(32768, UNTIED, _VL, WHOLE),
    "qwen3_vl/text": text_side(128000, UNTIED, _VL3),
    "qwen3_vl_moe/text": text_side(128000, UNTIED, replace(_VL3, heads=16, head_dim=None)),
    "qwen3_5/text": text_side(32768, UNTIED, _ROTARY3_5),
    "qwen3_5_moe/text": text_side(32768, UNTIED, _ROTARY3_5),
    "qwen4_exp_text": _qwen4(""),
    "qwen4_exp/text": _qwen4("language_model.", "text_config"),
}
