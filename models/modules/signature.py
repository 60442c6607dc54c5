"""Inputs, sizes and promises of the graph of a front-end: the facts for an export beside the module itself."""

import math
from collections.abc import Mapping, Sequence
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
        rows: positions that have a row of their own in a table; 0 where every place is like every other.
        exact: every bit is determined, because nothing but gathers, sums and products of two make up a vector.
        indices: name of each further index that a token has, an input int64 (batch, length) -> how many there are, so
            that 0 to that number - 1 are legal; in the order in which they are added. Segments are `token_type_ids`.
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
    indices: Mapping[str, int] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    counts: Literal["slots", "ids", "mask"] = "slots"
    needs_mask: bool = False
    padding_idx: int | None = None
    refused_ids: tuple[int, ...] = ()
    lookup_width: int | None = None
    consumer_scales: bool | None = None
    rotary: Mapping[str, int] = field(default_factory=dict)
    rotary_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class StemSignature:
    """The input, sizes and promises of a stem, whose input is an image or a spectrogram.

    Args:
        family: its row of the family table, or another name for what it is.
        width: D, of an output vector.
        input: name of the only input, float32.
        shape: of the input; a dimension is a number, or a name where it is dynamic.
        rows: of its table of positions.
        terms: products that are summed for one number of its widest convolution.
        image_size: native height and width; None for spectrograms.
        patch_size: of which height and width are multiples where they are not native; None for spectrograms.
        exact: every bit is determined; False, since a convolution may sum in any order.

    """

    family: str
    width: int
    input: str
    shape: tuple[int | str, ...]
    rows: int
    terms: int
    image_size: int | None = None
    patch_size: int | None = None
    exact: bool = False

    def length(self, *size: int) -> int:
        """Return the vectors of one input, for images given its height and width."""
        return 1 + math.prod(pixels // self.patch_size for pixels in size) if self.patch_size else self.rows

    def check(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless an input may have `shape`.

        A patch that is not whole would be left out without a word, so it is refused, except where the native size has
        one: there the model was trained so.
        """
        fits = len(shape) == len(self.shape) and all(
            isinstance(allowed, str) or got == allowed for got, allowed in zip(shape, self.shape, strict=True)
        )
        if not fits:
            allowed = ", ".join(map(str, self.shape))
            raise ValueError(f"{self.input}: got shape {tuple(shape)}, allowed ({allowed})")
        if self.patch_size is None or self.image_size is None:
            return
        native, (height, width) = self.image_size, shape[2:]
        whole = height and width and height % self.patch_size == 0 and width % self.patch_size == 0
        if not whole and (height, width) != (native, native):
            raise ValueError(
                f"{self.input}: got height {height} and width {width}, allowed multiples of {self.patch_size}, "
                f"the patch size, or {native} and {native}"
            )
