"""Rows of the family tables: the front-end of one published model, given its `config.json`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from preblock.models.families.published_config import Config
from preblock.models.families.readings import Reading
from preblock.models.families.rotary import Rotary
from preblock.models.modules.bias import BiasConfig
from preblock.models.modules.ngram_config import NgramConfig
from preblock.models.modules.per_layer_config import PerLayerConfig
from preblock.models.steps import Step, Tokens

if TYPE_CHECKING:
    from preblock.models.modules.stems import StemConfig

ALL = -1
"""Wildcard of a lookup: every step."""
WHOLE = ""
"""The whole config, among sections."""


class Tied(NamedTuple):
    """The table of a head that the library ties to the token table; a file may hold either."""

    by_default: bool
    """The default of `tie_word_embeddings` in the library."""
    head: str = "lm_head.weight"


TIED, UNTIED = Tied(by_default=True), Tied(by_default=False)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the family table. None says that the model has no such part.

    Args:
        steps: the steps, given the config; sizes come from the tensors, those of derived tables from the config.
        prefix: prefix of the keys in the file of a model with a head; "" for none.
        limit: key of max_len in the config and its default in the library, for models without a table of positions;
            None for no limit.
        rotary: its rotary attention.
        bias: its attention bias by distance, given the config.
        tied: its head; None without one, or with one that is never tied or named by the steps.
        consumers: readers of `inputs_embeds` with a scale; None for transformers alone, as `consumer_scales` says.
        padding: default padding id; None for none.
        vocab: keys of the rows of its token table; the first stated one counts. Default `vocab_size`.
        only: keys with an effect on the front-end -> their supported values. A dot leads into an object.
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
        parts: further `model_type`s of the part in `sections` -> the rows in place of this one; default none.

    """

    steps: Callable[[Config], list[Step]]
    prefix: str
    limit: tuple[str, int] | None
    rotary: Rotary | None
    bias: Callable[[Config], BiasConfig | None] | None
    tied: Tied | None
    consumers: tuple[Reading, ...] | None
    padding: int | None = None
    vocab: tuple[str, ...] = ("vocab_size",)
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
    parts: "Mapping[str, Family]" = field(default_factory=dict)

    def longest_input(self, config: Config) -> Any:
        """Return max_len of a model without a table of positions, as `config` states it; None for no limit."""
        return config(*self.limit) if self.limit else None

    def rotary_of(self, values: Mapping[str, Any]) -> Rotary | None:
        """Return the rotary attention of a model with the config `values`; None if it is not rotary."""
        return self.rotary if self.rotary and self.rotary.when(Config(values)) else None

    def with_head(self, steps: Sequence[Step], config: Config) -> list[Step]:
        """Return `steps`, the token table with the name of a tied head too, used if its own is missing.

        Args:
            steps: of this row.
            config: all of `config.json`.

        """
        tokens, *others = steps
        assert isinstance(tokens, Tokens)
        if self.tied and config("tie_word_embeddings", self.tied.by_default):
            tokens = replace(tokens, weight=tuple(dict.fromkeys((*tokens.weight, self.tied.head))))
        return [tokens, *others]


def absolute(steps: Callable[[Config], list[Step]], prefix: str, tied: Tied | None) -> Family:
    """Return a row with absolute positions, a step: attention has none, and their table sets the limit."""
    return Family(steps=steps, prefix=prefix, limit=None, rotary=None, bias=None, tied=tied, consumers=None)


@dataclass(frozen=True, kw_only=True)
class StemFamily:
    """One row: an encoder of images or spectrograms.

    Args:
        config: the sizes of the stem, given its name and the config.
        keys: name in `state_dict()` of the stem -> key in a base model's file.
        prefixes: prefixes of the keys in other models' files.
        sections: keys of the part about this model, in the config of several models; the first one found is used.
            Default none, for the whole config.

    """

    config: "Callable[[str, Config], StemConfig]"
    keys: Mapping[str, str]
    prefixes: tuple[str, ...]
    sections: tuple[str, ...] = ()
