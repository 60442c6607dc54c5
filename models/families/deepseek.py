"""Rows of DeepSeek, and of Sarvam."""

from dataclasses import replace

from preblock.models.families.decoders import decoder
from preblock.models.families.family import UNTIED, Family
from preblock.models.families.rotary import Rotary, part_of_head, theta

_ROTARY = Rotary(dim=("qk_rope_head_dim", 64), layout="interleaved")

DEEPSEEK: dict[str, Family] = {
    "deepseek_v2": decoder(2048, UNTIED, _ROTARY),
    "deepseek_v3": decoder(4096, UNTIED, replace(_ROTARY, interleaved="rope_interleave", repeated="head_dim")),
    "deepseek_v32": decoder(163840, UNTIED, _ROTARY),
    "sarvam_mla": decoder(
        4096, UNTIED, replace(_ROTARY, interleaved="rope_interleave", aliases={"deepseek_yarn": "yarn"})
    ),
    # Published files have names from before the library's support.
    "sarvam_moe": decoder(
        131072,
        UNTIED,
        Rotary(heads=64, head_dim=64, share=part_of_head(1.0), thetas=theta(8_000_000.0)),
        "embed_tokens",
        "word_embeddings",
    ),
}
