"""Rows of Granite: a token table with a multiplier, which the model applies to given vectors too."""

from dataclasses import replace

from preblock.models.families.decoders import multiplied
from preblock.models.families.family import Family
from preblock.models.families.readings import GENAI, READ_VERSION, TRANSFORMERS, Reading
from preblock.models.families.rotary import Rotary

_ROTARY = Rotary(heads=32)
_CONSUMERS = (
    Reading(engine=TRANSFORMERS, versions=f"=={READ_VERSION}", scale="none", source=READ_VERSION),
    Reading(engine="vllm", versions=">=0.17", scale="none", source="0.17.1 and 0.18.0"),
)
_LLAMA_CPP = Reading(
    engine="llama.cpp",
    versions="02eabed",
    scale="none",
    source="src/models/granite.cpp, for models without deepstack layers",
)

GRANITE: dict[str, Family] = {
    "granite": multiplied(
        2048,
        _ROTARY,
        (*_CONSUMERS, Reading(engine="sglang", versions="==0.5.9", scale="none", source="0.5.9"), _LLAMA_CPP, GENAI),
    ),
    "granitemoe": multiplied(2048, _ROTARY, _CONSUMERS),
    "granitemoeshared": multiplied(2048, _ROTARY, _CONSUMERS),
    "granitemoehybrid": multiplied(
        2048, replace(_ROTARY, when=lambda c: c.nullable("position_embedding_type", None) == "rope"), _CONSUMERS
    ),
}
