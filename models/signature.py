"""What the graph of a front-end takes and promises: all that an export needs to know of it beside the module itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The sizes, inputs and promises of a front-end.

    Args:
        family: its row of the family table, or another name for what it is.
        vocab_size: V.
        width: D, of an output vector.
        max_len: M, the largest legal offset + real tokens; None where nothing limits it.
        rows: of its table of positions; 0 where every place is like every other.
        exact: every bit is determined, because nothing but gathers, sums and products of two make up a vector.
        segments: S, or 0.
        counts: what advances the position: every slot, ids other than padding, or the mask.
        needs_mask: `attention_mask` is an input.
        padding_idx: id of padding; None for none.
        refused_ids: ids whose vectors would depend on other tokens.
        lookup_width: width of the model's own lookup; None where that is the output itself.
        consumer_scales: who is handed the lookup's vectors scales them; None where that is not known.
        rotary: names of its rotary outputs, cosines and sines -> their width R; default none.
        rotary_len: the largest legal offset + tokens for them; None for that of the vectors.

    """

    family: str
    vocab_size: int
    width: int
    max_len: int | None
    rows: int
    exact: bool
    segments: int = 0
    counts: Literal["slots", "ids", "mask"] = "slots"
    needs_mask: bool = False
    padding_idx: int | None = None
    refused_ids: tuple[int, ...] = ()
    lookup_width: int | None = None
    consumer_scales: bool | None = None
    rotary: Mapping[str, int] = field(default_factory=dict)
    rotary_len: int | None = None
