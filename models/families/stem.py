"""A row of the stem table: a published encoder of images or spectrograms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preblock.models.families.published_config import Config

if TYPE_CHECKING:
    from preblock.models.modules.stems import StemConfig


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
