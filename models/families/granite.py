"""Rows of Granite: a token table with a multiplier, which the model applies to given vectors too."""

from preblock.models.families import readings
from preblock.models.families.decoders import multiplied
from preblock.models.families.family import Family
from preblock.models.families.readings import Reading
from preblock.models.families.rotary import Rotary

_CONSUMERS = (readings.transformers_reading("none"), readings.VLLM_SCALES)
_LLAMA_CPP = Reading(
    engine="llama.cpp",
    versions="02eabed",
    scale="none",
    source="src/models/granite.cpp, for models without deepstack layers",
)
_SGLANG_SHARED = Reading(engine="sglang", versions=">=0.5.23", scale="none", source="0.5.23")
_ROTARY = Rotary(heads=32)
_HYBRID_ROTARY = Rotary(heads=32, when=lambda c: c.nullable("position_embedding_type", None) == "rope")

GRANITE: dict[str, Family] = {
    "granite": multiplied(2048, _ROTARY, (*_CONSUMERS, readings.SGLANG_SCALES, _LLAMA_CPP, readings.GENAI)),
    "granitemoe": multiplied(2048, _ROTARY, (*_CONSUMERS, readings.SGLANG_SCALES)),
    "granitemoeshared": multiplied(2048, _ROTARY, (*_CONSUMERS, _SGLANG_SHARED)),
    "granitemoehybrid": multiplied(2048, _HYBRID_ROTARY, (*_CONSUMERS, readings.SGLANG_TAKES_SCALED)),
}
