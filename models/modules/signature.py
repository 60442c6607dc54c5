"""Inputs, sizes and promises of the graph of a front-end: the facts for an export beside the module itself."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The sizes, inputs and promises of a front-end.

    Args:
        family: name of its row in the family table, or another name.
        vocab_size: V.
        width: D, of an output vector.
        max_len: M, the largest legal offset + real tokens; None without a limit.
        rows: rows of the position table; 0 without one.
        exact: whether every bit is determined, because vectors consist of gathers, and sums and products of two.
        indices: name of each further index of a token, an input int64 (batch, length) -> number of legal values,
            counted from 0; in the order of addition. Segments are `token_type_ids`.
        needed: names of the indices without a default.
        counts: source of positions: every slot, ids other than padding, or the mask.
        needs_mask: whether `attention_mask` is an input.
        padding_idx: id of padding; None for none.
        refused_ids: unsupported ids: their vectors would depend on other tokens.
        lookup_width: width of the model's own lookup; None if the lookup is the output.
        unscaled_width: width of the lookup without its embedding scale; None if the lookup includes no scale.
        per_layer: number of layers and width of the inputs of each; None without per-layer inputs.
        ngrams: number of layers with n-gram embeddings, and width of those of a layer; None without this output.
        row_ids: number of these layers, and heads of a layer: the rows of a token; None without any.
        history: number of ids before a row for them, an input `context` int64 (batch, history); default 0, no input.
        reset_id: id in place of each missing one there, and end of a sequence; None without `context`.
        rotary: names of its rotary outputs, cosines and sines -> their width R; default none.
        rotary_len: the largest legal offset + tokens for them; None for `max_len`.

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
    unscaled_width: int | None = None
    per_layer: tuple[int, int] | None = None
    ngrams: tuple[int, int] | None = None
    row_ids: tuple[int, int] | None = None
    history: int = 0
    reset_id: int | None = None
    rotary: Mapping[str, int] = field(default_factory=dict)
    rotary_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class StemSignature:
    """The input, sizes and promises of a stem: a front-end of images or spectrograms.

    Args:
        family: name of its row in the family table, or another name.
        width: D, of an output vector.
        input: name of the only input, float32.
        shape: shape of the input; a dimension is a number, or a name if it is dynamic.
        rows: rows of its table of positions.
        terms: products summed for one value of its widest convolution.
        image_size: native height and width; None for spectrograms.
        patch_size: side of a patch; height and width are native, or multiples of it. None for spectrograms.
        exact: whether every bit is determined; False, because a convolution may sum in any order.

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
        """Return the number of vectors of one input; `size` is height and width of an image."""
        return 1 + math.prod(pixels // self.patch_size for pixels in size) if self.patch_size else self.rows

    def check(self, shape: Sequence[int]) -> None:
        """Check the shape of an input.

        A convolution silently drops partial patches. They are rejected, except at the native size of the model,
        because it was trained with them dropped.

        Raises:
            ValueError: the shape is not allowed.

        """
        fits = len(shape) == len(self.shape) and all(
            isinstance(allowed, str) or got == allowed for got, allowed in zip(shape, self.shape, strict=True)
        )
        if not fits:
            allowed = ", ".join(map(str, self.shape))
            raise ValueError(f"{self.input}: got shape {tuple(shape)}, expected ({allowed})")
        if self.patch_size is None or self.image_size is None:
            return
        native, (height, width) = self.image_size, shape[2:]
        whole = height and width and height % self.patch_size == 0 and width % self.patch_size == 0
        if not whole and (height, width) != (native, native):
            raise ValueError(
                f"{self.input}: got height {height} and width {width}, expected multiples of {self.patch_size}, "
                f"the patch size, or {native} and {native}"
            )
