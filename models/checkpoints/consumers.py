"""The consumers of `inputs_embeds` of a front-end."""

from typing import Literal

from preblock.models.config import FrontEndConfig
from preblock.models.families import FAMILIES
from preblock.models.families.readings import READ_VERSION, Reading, transformers_reading
from preblock.models.modules.per_layer_config import INPUTS, TOKEN_INPUTS

MODEL = "model"
"""Consumer of a custom front-end: the model behind it."""


def _base(family: str) -> str:
    """Return the name of a model without the ending of a text side."""
    return family.removesuffix("/tokens").removesuffix("/text").removesuffix("_text")


CONSUMERS = {_base(name): row.consumers for name, row in FAMILIES.items() if row.consumers}
"""Model -> its consumers, for every text side of it. Other families have a row of transformers alone."""


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
    known = CONSUMERS.get(_base(config.family))
    if known or config.consumer_scales is None:
        return known or ()
    scale: Literal["applied", "none"] = "none" if config.consumer_scales else "applied"
    if discovered_with is None and config.family.removesuffix("/tokens") not in FAMILIES:
        return (Reading(engine=MODEL, versions="", scale=scale, source="the source's consumer_scales"),)
    version = discovered_with.rpartition(" ")[2] if discovered_with else READ_VERSION
    return (transformers_reading(scale, version),)
