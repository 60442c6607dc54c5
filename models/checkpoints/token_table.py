"""The token table of a front-end, alone."""

from preblock.models.config import FrontEndConfig
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
    alone = FrontEndConfig(
        family=f"{config.family}/tokens",
        steps=config.steps[:count],
        max_len=None,
        padding_idx=config.padding_idx,
        lookup=count,
        consumer_scales=config.consumer_scales,
        arithmetic=config.arithmetic,
        dropout=config.dropout,
    )
    return FrontEndData(alone, {name: frontend.tensors[name] for name in shapes_of(alone)})
