"""Rows of state-space models, and of hybrids of these with attention."""

from dataclasses import replace

from preblock.models.families.decoders import decoder, multiplied
from preblock.models.families.family import TIED, UNTIED, Family, Tied
from preblock.models.families.readings import VLLM_SCALES, transformers_reading
from preblock.models.families.rotary import Rotary

_MAMBA = decoder(None, TIED, None, "embeddings", "embedding", prefix="backbone.")

MAMBA: dict[str, Family] = {
    "mamba": _MAMBA,
    "mamba2": replace(_MAMBA, tied=UNTIED),
    "falcon_mamba": _MAMBA,
    "rwkv": replace(
        decoder(None, Tied(False, "head.weight"), None, "embeddings", prefix="rwkv."), limit=("context_length", 1024)
    ),
    "nemotron_h": decoder(4096, None, None, "embeddings", prefix="backbone."),
    "jamba": decoder(262144, UNTIED, None),
    "bamba": decoder(262144, UNTIED, Rotary(heads=32, share=(None, 0.5))),
    "falcon_h1": multiplied(8192, Rotary(heads=32), (transformers_reading("applied"), VLLM_SCALES), lookup=2),
}
