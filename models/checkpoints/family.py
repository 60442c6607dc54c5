"""A row of the family table: the front-end of one published model, given its `config.json`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.per_layer_config import PerLayerConfig
from preblock.models.steps import Step

ALL = -1
"""Wildcard of a lookup: every step."""
WHOLE = ""
"""The whole config, among sections."""


class Config:
    """`config.json`, with the library's defaults for keys missing from older files.

    Args:
        values: content of the file.
        segments: the caller chose segments, in families with optional ones; default False.

    """

    def __init__(self, values: Mapping[str, Any], segments: bool = False) -> None:
        self._values, self.segments = values, segments
        self.missing: list[str] = []
        """Requested keys without a value and without a default."""

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default if the key is absent or null."""
        value = self._values.get(key)
        if value is None and default is None:
            self.missing.append(key)
        return default if value is None else value

    def nullable(self, key: str, default: Any) -> Any:
        """Return a value, None if it is null, or the default if the key is absent: null has a meaning of its own."""
        return self._values.get(key, default)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the family table.

    Args:
        steps: the steps, given the config; sizes come from the tensors, those of derived tables from the config.
        prefix: prefix of the keys in the file of a model with a head; default none.
        limit: key of max_len in the config and its default in the library, perhaps given the config, for models without
            a table of positions; None for no limit.
        padding: default padding id; None for none.
        only: keys with an effect on the front-end -> their supported values.
        refused: unsupported ids, given the whole config, other models' parts included: their vectors depend on other
            tokens or on another table.
        zeroed: id whose row of the token table the library replaces by zeros, given the config; None for none.
        lookup: number of steps of the model's own lookup, given the config, or ALL; default 1.
        consumer_scales: the model scales `inputs_embeds` itself; default False.
        per_layer: inputs of all layers, given the config; default none.
        ngrams: n-gram embeddings of some layers, given the config; default none.
        streams: streams of vectors that block 0 takes, given the config; default 1.
        copies: equal copies of each vector that block 0 takes, given the config; default 1.
        segments: its segments are optional and rows of the token table. Default False: it has a table of segments, or
            none.
        sections: keys of the part about this model, in the config of several models; the first one found is used.
            `WHOLE` is always found. Default none, for the whole config.

    """

    steps: Callable[[Config], list[Step]]
    prefix: str = ""
    limit: tuple[str, int | Callable[[Config], int]] | None = None
    padding: int | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    refused: Callable[[Config], list[int]] = lambda _: []
    zeroed: Callable[[Config], int | None] = lambda _: None
    lookup: Callable[[Config], int] = lambda _: 1
    consumer_scales: bool = False
    per_layer: Callable[[Config], PerLayerConfig | None] = lambda _: None
    ngrams: Callable[[Config], NgramConfig | None] = lambda _: None
    streams: Callable[[Config], int] = lambda _: 1
    copies: Callable[[Config], int] = lambda _: 1
    segments: bool = False
    sections: tuple[str, ...] = ()

    def longest_input(self, config: Config) -> Any:
        """Return max_len of a model without a table of positions, as `config` states it; None for no limit."""
        if self.limit is None:
            return None
        key, default = self.limit
        return config(key, default(config) if callable(default) else default)
