"""The token table of a front-end, alone."""

from dataclasses import replace

from preblock.models.frontend_data import FrontEndData, shapes_of
from preblock.models.steps import Scale


def keep_tokens(frontend: FrontEndData) -> FrontEndData:
    """Return the lookup of `frontend`, around the same tensors: its token table, and the scale that belongs to it.

    The family gets the ending `/tokens`.
    """
    config = frontend.config
    count = 1
    while count < config.lookup and isinstance(config.steps[count], Scale):
        count += 1
    alone = replace(
        config,
        family=f"{config.family}/tokens",
        steps=config.steps[:count],
        max_len=None,
        refused_ids=(),
        lookup=count,
        bias=None,
        rotary=(),
        no_rotary=None,
        per_layer=None,
        ngrams=None,
        streams=1,
        copies=1,
    )
    return FrontEndData(alone, {name: frontend.tensors[name] for name in shapes_of(alone)})
