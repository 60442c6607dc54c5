"""The token table of a front-end, alone."""

from dataclasses import replace

from preblock.models.frontend_data import FrontEndData
from preblock.models.steps import Scale, Tokens, names_of


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
    names = [name for name, step in zip(names_of(config.steps), config.steps, strict=True) if isinstance(step, Tokens)]
    tensors = {name: value for name, value in frontend.tensors.items() if name.partition(".")[0] in names}
    return FrontEndData(alone, tensors)
