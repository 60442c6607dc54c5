"""Attention by distance between query and key: T5's learned bias, and the sinusoids of Transformer-XL and XLNet.

Letters: D model width, H heads, Q query length, K key length.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from preblock.models.modules.bias import T5Config, relative_frequencies, t5_borders
from preblock.models.modules.derived_buffer import DerivedBuffers
from preblock.models.modules.initialisers import DEFAULT_STD, Initialiser, initialise_


def relative_positions(
    query_offset: int, query_length: int, key_length: int, device: torch.device | None = None
) -> Tensor:
    """Return the position of every key less that of every query: int64 (Q, K).

    Args:
        query_offset: position of the first query: the number of keys fed before it.
        query_length: Q.
        key_length: K; keys have positions 0 to K - 1.
        device: device of the result; default torch's.

    Raises:
        ValueError: one of them is negative.

    """
    check_lengths(query_offset=query_offset, query_length=query_length, key_length=key_length)
    queries = torch.arange(query_length, device=device).unsqueeze(1) + query_offset
    return torch.arange(key_length, device=device) - queries


def check_lengths(**lengths: int) -> None:
    """Refuse a negative length, by its name.

    Raises:
        ValueError: one of them is negative.

    """
    # In an export the lengths are symbols, and a check on them would become a condition of the graph.
    if torch.compiler.is_exporting():
        return
    for name, length in lengths.items():
        if length < 0:
            raise ValueError(f"{name}: got {length}, expected 0 or more")


class T5RelativeBias(nn.Module):
    """One trained number per head and bucket of distances, added to the attention scores (Raffel et al. 2019,
    section 2.1).

    Half of a direction's buckets hold one distance each; the others grow with the logarithm of the distance up to
    `max_distance`; all longer distances share the last.

    Args:
        heads: H.
        buckets: rows of the table (buckets, H), over both directions; default 32, as in T5.
        max_distance: smallest distance in tokens of the last bucket; default 128, as in T5.
        bidirectional: True for an encoder: half of the buckets are for keys after the query. False for a decoder:
            keys after the query get the bucket of distance 0, and a causal mask has to hide them. Default True.
        init: initial values of the table, a name of `INITIALISERS`, or pretrained values of the shape of the table;
            default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: a half has no bucket, or two directions share an odd number of buckets; `max_distance` is within
            the buckets of one distance each; `init` is unknown or not of shape (buckets, H); or `std` is not above 0.

    """

    def __init__(
        self,
        heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        init: Initialiser | Tensor = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        super().__init__()
        config = T5Config(heads=heads, buckets=buckets, max_distance=max_distance, bidirectional=bidirectional)
        self.one_way = buckets // 2 if bidirectional else buckets
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self._borders = t5_borders(config)
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        initialise_(self.weight, init, std)

    def forward(self, query_offset: int, query_length: int, key_length: int) -> Tensor:
        """Return the bias (1, H, Q, K), in the type of the table.

        Args:
            query_offset: position of the first query: the number of cached keys.
            query_length: Q.
            key_length: K, cached keys included; keys have positions 0 to K - 1.

        Raises:
            ValueError: an argument is negative.

        """
        relative = relative_positions(query_offset, query_length, key_length, self.weight.device)
        distance = relative.abs() if self.bidirectional else (-relative).clamp(min=0)
        borders = torch.tensor(self._borders, device=relative.device)
        buckets = torch.bucketize(distance, borders, right=True)
        if self.bidirectional:
            buckets = buckets + (relative > 0) * self.one_way
        return F.embedding(buckets, self.weight).permute(2, 0, 1).unsqueeze(0)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        buckets, heads = self.weight.shape
        return f"heads={heads}, buckets={buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


class RelativeSinusoid(DerivedBuffers):
    """Sinusoids of the distances between Q queries and K keys; the last query stands at the last key (Dai et al.
    2019, section 3.3; Yang et al. 2019).

    Row r belongs to the distance K - r (query position less key position): query i and key j share row Q - i + j. In
    attention, a trained matrix maps each row to a vector R of every head. The score of query i and key j is
    (q_i + u) . k_j + (q_i + v) . R[Q - i + j], with a trained u and v per head. The sines of the D/2 frequencies come
    first, then the cosines. They are computed in float32, as published. The module has no trained parameters.

    Args:
        d_model: D; even.
        clamp_len: tokens; a distance beyond it counts as it, in both directions. None for no limit.
        bidirectional: True for keys on both sides of a query (XLNet "bi"), False for none after it (Transformer-XL,
            XLNet "uni").

    Raises:
        ValueError: D is odd, or `clamp_len` is less than 1.

    """

    frequencies: Tensor

    def __init__(self, d_model: int, clamp_len: int | None = None, bidirectional: bool = True) -> None:
        if d_model < 2 or d_model % 2:
            raise ValueError(f"d_model: got {d_model}, expected an even width of 2 or more")
        if clamp_len is not None and clamp_len < 1:
            raise ValueError(f"clamp_len: got {clamp_len}, expected 1 or more, or None")
        super().__init__(frequencies=partial(relative_frequencies, d_model))
        self.d_model, self.clamp_len, self.bidirectional = d_model, clamp_len, bidirectional

    def forward(self, query_length: int, key_length: int) -> Tensor:
        """Return the float32 rows of the distances K down to 1 - Q (bidirectional) or to 0.

        Args:
            query_length: Q.
            key_length: K, past keys included.

        Returns:
            (K + Q, D), or (K + 1, D) if not bidirectional.

        Raises:
            ValueError: a length is negative.

        """
        check_lengths(query_length=query_length, key_length=key_length)
        rows = key_length + (query_length if self.bidirectional else 1)
        distance = key_length - torch.arange(rows, device=self.frequencies.device)
        if self.clamp_len is not None:
            distance = distance.clamp(-self.clamp_len, self.clamp_len)
        angle = distance.unsqueeze(1).to(torch.float32) * self.frequencies
        return torch.cat((angle.sin(), angle.cos()), dim=-1)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"d_model={self.d_model}, clamp_len={self.clamp_len}, bidirectional={self.bidirectional}"
