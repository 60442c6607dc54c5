"""Rows of T5: a row for each side."""

from preblock.models.families.family import Family
from preblock.models.families.named_steps import count, token_step
from preblock.models.modules.bias import T5Config


def _t5(side: str, other: str) -> Family:
    return Family(
        # The library shares one table, whatever the config says; a side's own table in the file wins.
        steps=lambda _: [token_step(f"{side}.embed_tokens", "shared", f"{other}.embed_tokens", "lm_head")],
        prefix="",
        limit=None,
        rotary=None,
        bias=lambda c: T5Config(
            heads=count(c, 8, "num_heads"),
            buckets=count(c, 32, "relative_attention_num_buckets"),
            max_distance=count(c, 128, "relative_attention_max_distance"),
            bidirectional=side == "encoder",
            weight=(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        ),
        tied=None,
        consumers=None,
    )


T5: dict[str, Family] = {"t5/encoder": _t5("encoder", "decoder"), "t5/decoder": _t5("decoder", "encoder")}
