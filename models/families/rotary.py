"""A part of a row of the family table: how a published model turns queries and keys.

Read from transformers 5.24, and checked against it.
Letters: R rotary width, M maximum length.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from preblock.models.families.layer_kinds import FULL, SLIDING
from preblock.models.families.published_config import Config

Theta = tuple[str | None, float]
Share = tuple[str | None, float | Callable[[Config], float]]
TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The rotary attention of a family.

    Args:
        heads: default number of heads of attention.
        head_dim: default width of a head; None for the hidden size over the heads.
        widths: ending of the names of the outputs -> width of a head, given the config, in place of `head_dim`;
            default none.
        dim: key of R and its default; None for R as a share of a head.
        repeated: key that must repeat R where a file has it; default none.
        share: key of this share, or None if the library reads none beside `rope_parameters`, and its default, perhaps
            given the config; None for all of a head, except for the type "proportional". Null in a file means all of
            a head too.
        thetas: ending of the names of the outputs -> the key of theta beside `rope_parameters`, or None, and its
            default. Several if layers differ: `rope_parameters` then has an object for each.
        scaled: endings, of several, for an old `rope_scaling`; none if the library reads it in place of
            `rope_parameters`.
        strict: whether the library fails for `rope_parameters` that mix objects for kinds of layers with numbers for
            all layers. By default, it ignores the other form. Not read for rows without `types`, and for rows with
            several `thetas` and nothing `scaled`.
        layers: endings in use by the layers, given the config; default all.
        types: rope types known to the library; none if it reads no `rope_parameters`.
        aliases: other names of rope types.
        default: `rope_parameters` of a file without any, with an object for each ending if layers differ; default none.
        original_len: default length of pretraining; None for the longest input.
        layout: layout of the pairs of columns, as in `rotate`.
        interleaved: key that is false for the layout "half" in place of `layout`; default none.
        sections: default of `mrope_section`, pairs for each of the three axes of positions; default none, one axis.
        order: order of the axes among the pairs: "sections", each contiguous; "mixed", in turn; or "time_last", height
            and width in turn, and then time, with sections for height, width and time. Default "sections".
        mscales: the type "longrope" has factors on cos and sin of its own, and no long factors for frequencies.
        ntk_alpha: the type "dynamic" with `alpha` stretches theta by a fixed factor; default False.
        angles: type of angles in the library, as in `RotaryConfig`.
        tensors: keys of a tensor with the R/2 frequencies, or of a table (M, R) of sines and then cosines. If the
            file has it, it wins over the config.
        when: whether a model is rotary, given its config; default always.

    """

    heads: int = 0
    head_dim: int | None = None
    widths: Callable[[Config], Mapping[str, Any]] | None = None
    dim: tuple[str, int] | None = None
    repeated: str | None = None
    share: Share | None = None
    thetas: Mapping[str, Theta] = field(default_factory=lambda: theta(10000.0))
    scaled: tuple[str, ...] = ()
    strict: bool = False
    layers: Callable[[Config], Container[str]] | None = None
    types: tuple[str, ...] = TYPES
    aliases: Mapping[str, str] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)
    original_len: int | None = None
    layout: Literal["half", "interleaved"] = "half"
    interleaved: str | None = None
    sections: tuple[int, ...] = ()
    order: Literal["sections", "mixed", "time_last"] = "sections"
    mscales: bool = False
    ntk_alpha: bool = False
    angles: Literal["float32", "float64"] = "float32"
    tensors: tuple[str, ...] = ()
    when: Callable[[Config], bool] = lambda _: True


def theta(default: float, key: str | None = "rope_theta") -> dict[str, Theta]:
    """Return one theta for all layers, and its key beside `rope_parameters`."""
    return {"": (key, default)}


def thetas_by_layer(full: Theta, sliding: Theta) -> dict[str, Theta]:
    """Return a theta for each kind of layers."""
    return {FULL: full, SLIDING: sliding}


def part_of_head(default: float | Callable[[Config], float]) -> Share:
    """Return R as a share of a head, by its usual key."""
    return "partial_rotary_factor", default
