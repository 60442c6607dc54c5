"""Consumers of `inputs_embeds`: whether each takes vectors with or without the embedding scale, by its version.

Each row was read in the consumer's source; `source` names the release or the commit. The rows of transformers are
compared with the library in `tests/families/test_consumers.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from preblock.models.checkpoints.families import FAMILIES
from preblock.models.config import FrontEndConfig
from preblock.models.modules.per_layer_config import INPUTS, TOKEN_INPUTS

MODEL = "model"
"""Consumer of a custom front-end: the model behind it."""
TRANSFORMERS = "transformers"
READ_VERSION = "5.24.0"
"""Release of transformers behind the family table."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The scale that a consumer expects of given vectors.

    Args:
        engine: name of the consumer.
        versions: versions in the form of a requirement; a commit where the source was read; "" for every one.
        scale: "applied" for vectors with the embedding scale, "none" for vectors that the consumer scales itself.
        source: releases, a pull request, or a file of the commit, as read.

    """

    engine: str
    versions: str
    scale: Literal["applied", "none"]
    source: str


_GENAI = Reading(
    engine="onnxruntime-genai",
    versions="a0c04eb",
    scale="applied",
    source="src/python/py/models/builders/base.py: exclude_embeds leaves the scale out with the table",
)
_OPENVINO = Reading(
    engine="openvino-genai",
    versions="da1db86",
    scale="applied",
    source="src/cpp/src/visual_language/embedding_model.cpp: multiplies by scale_emb of config.json",
)


_SGLANG_SCALES = Reading(engine="sglang", versions=">=0.5.9", scale="none", source="0.5.9 and 0.5.23")
_SGLANG_TAKES_SCALED = Reading(engine="sglang", versions=">=0.5.9", scale="applied", source="0.5.9 and 0.5.23")


def _gemma(llama_cpp: Reading) -> tuple[Reading, ...]:
    """Gemma and Gemma 2: transformers and vLLM scaled given vectors in earlier versions."""
    return (
        Reading(engine=TRANSFORMERS, versions=">=5.4", scale="applied", source="5.4.0 and 5.24.0"),
        Reading(engine=TRANSFORMERS, versions="<5.4", scale="none", source="4.57.1 and 5.3.0"),
        Reading(engine="vllm", versions=">=0.18", scale="applied", source="0.18.0 and 0.33.0; pull request 36787"),
        Reading(engine="vllm", versions="<0.18", scale="none", source="0.17.1"),
        _SGLANG_SCALES,
        llama_cpp,
        _GENAI,
    )


_GEMMA3 = (
    Reading(engine=TRANSFORMERS, versions=">=4.57", scale="applied", source="4.57.1, 5.4.0 and 5.24.0"),
    Reading(engine="vllm", versions=">=0.17", scale="applied", source="0.17.1, 0.18.0 and 0.33.0"),
    _SGLANG_TAKES_SCALED,
    Reading(engine="llama.cpp", versions="569a009", scale="applied", source="src/models/gemma3.cpp"),
    _GENAI,
    _OPENVINO,
)
_GEMMA3N = (_GEMMA3[0], _OPENVINO)
_GRANITE = (
    Reading(engine=TRANSFORMERS, versions=f"=={READ_VERSION}", scale="none", source=READ_VERSION),
    Reading(engine="vllm", versions=">=0.17", scale="none", source="0.17.1, 0.18.0 and 0.33.0"),
)
CONSUMERS: Mapping[str, tuple[Reading, ...]] = {
    "gemma": _gemma(Reading(engine="llama.cpp", versions="860ee92", scale="applied", source="src/models/gemma.cpp")),
    "gemma2": _gemma(Reading(engine="llama.cpp", versions="82234e0", scale="none", source="src/models/gemma2.cpp")),
    "gemma3": _GEMMA3,
    "gemma3n": _GEMMA3N,
    "granite": (
        *_GRANITE,
        _SGLANG_SCALES,
        Reading(
            engine="llama.cpp",
            versions="02eabed",
            scale="none",
            source="src/models/granite.cpp, for models without deepstack layers",
        ),
        _GENAI,
    ),
    "granitemoe": (*_GRANITE, _SGLANG_SCALES),
    "granitemoehybrid": (*_GRANITE, _SGLANG_TAKES_SCALED),
    "granitemoeshared": (
        *_GRANITE,
        Reading(engine="sglang", versions=">=0.5.23", scale="none", source="0.5.23"),
    ),
    "falcon_h1": (
        Reading(engine=TRANSFORMERS, versions=f"=={READ_VERSION}", scale="applied", source=READ_VERSION),
        Reading(engine="vllm", versions=">=0.17", scale="none", source="0.17.1, 0.18.0 and 0.33.0"),
    ),
}
"""Model type, without the ending of a text side -> its consumers. Other families have a row of transformers alone."""


def inputs_beside(config: FrontEndConfig) -> dict[str, str]:
    """Return the arguments that the model takes beside `inputs_embeds`, and the output or input for each.

    Given vectors alone, Gemma 3n leaves out a part of every layer's input. Gemma 4 and Qwen4 search the whole token
    table for the ids of the vectors.
    """
    if config.per_layer:
        return {INPUTS: TOKEN_INPUTS}
    return {"ple_input_ids": "input_ids"} if config.ngrams else {}


def consumers_of(config: FrontEndConfig, discovered_with: str | None = None) -> tuple[Reading, ...]:
    """Return the consumers of a front-end with an embedding scale; () without one, because then all of them agree.

    Args:
        config: the front-end.
        discovered_with: library and version of its discovery; None for a row of the family table or another source.

    """
    if config.embedding_scale == 1:
        return ()
    known = CONSUMERS.get(config.family.removesuffix("/tokens").removesuffix("/text").removesuffix("_text"))
    if known or config.consumer_scales is None:
        return known or ()
    scale: Literal["applied", "none"] = "none" if config.consumer_scales else "applied"
    if discovered_with is None and config.family.removesuffix("/tokens") not in FAMILIES:
        return (Reading(engine=MODEL, versions="", scale=scale, source="the source's consumer_scales"),)
    version = discovered_with.rpartition(" ")[2] if discovered_with else READ_VERSION
    return (Reading(engine=TRANSFORMERS, versions=f"=={version}", scale=scale, source=version),)
