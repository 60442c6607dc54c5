"""The one general front-end: from token ids to the vectors that enter block 0.

Letters: B batch, L length, D model width, V vocabulary, M maximum length, S segments.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from incipit.models.positions import LearnedPositions, SinusoidalPositions
from incipit.models.tokens import TokenTable

POSITIONS = {"learned": LearnedPositions, "sinusoidal": SinusoidalPositions}


@dataclass(frozen=True, kw_only=True)
class FrontEndConfig:
    """What a front-end is made of, and how large its parts are.

    Args:
        family: the row of the family table that it follows.
        vocab_size: V.
        d_model: D.
        max_len: M.
        positions: "learned" or "sinusoidal".
        segments: S, rows of the segment table; 0 for none.
        token_scale: factor on the token vectors; default 1.
        norm_eps: epsilon of the LayerNorm after the sum; None for no norm.
        padding_idx: id of padding, whose row is not trained; None for none.
        dropout: probability after the sum, in training only; default 0.1.

    """

    family: str
    vocab_size: int
    d_model: int
    max_len: int
    positions: Literal["learned", "sinusoidal"] = "learned"
    segments: int = 0
    token_scale: float = 1.0
    norm_eps: float | None = None
    padding_idx: int | None = None
    dropout: float = 0.1


class FrontEnd(nn.Module):
    """Token vectors (scaled) + segments + positions, then LayerNorm, then dropout once, as the config says.

    Segments are added before positions: floating-point sums depend on the order, and published models add so.
    """

    def __init__(self, config: FrontEndConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = TokenTable(config.vocab_size, config.d_model, config.token_scale, config.padding_idx)
        self.segments: TokenTable | None = None
        if config.segments:
            self.segments = TokenTable(config.segments, config.d_model)
        # Dropout comes once, after the sum: the positions have none of their own.
        self.positions = POSITIONS[config.positions](config.d_model, config.max_len, dropout=0.0)
        self.norm: nn.LayerNorm | None = None
        if config.norm_eps is not None:
            self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    @classmethod
    def from_tensors(cls, config: FrontEndConfig, tensors: Mapping[str, Tensor]) -> "FrontEnd":
        """Build a front-end around `tensors`, named as in `state_dict()`, without a second copy of them.

        Raises:
            RuntimeError: a tensor is missing, of another shape, or not of this front-end.

        """
        with torch.device("meta"):
            module = cls(config)
        module.load_state_dict(dict(tensors), strict=True, assign=True)
        return module

    def forward(
        self,
        input_ids: Tensor,
        offset: int | Tensor = 0,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the vectors (B, L, D) that enter block 0.

        Args:
            input_ids: int64 (B, L).
            offset: tokens already fed (what GPT-2 calls `past_length`): an int, or int64 (1,) or (B,); default 0.
            token_type_ids: int64 (B, L), segment of each token; default all 0.
            position_ids: int64 (1 or B, L); excludes `offset`.

        Raises:
            ValueError: a position is not allowed, or segments were given to a front-end that has none.

        """
        x = self.tokens(input_ids)
        if self.segments is not None:
            x = x + self.segments(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        elif token_type_ids is not None:
            raise ValueError(f"token_type_ids: the front-end {self.config.family!r} has no segments")
        x = self.positions(x, position_ids, offset)
        if self.norm is not None:
            x = self.norm(x)
        vectors: Tensor = self.dropout(x)
        return vectors


def transformer_embedding(
    vocab_size: int,
    d_model: int,
    max_len: int,
    positions: Literal["learned", "sinusoidal"] = "sinusoidal",
    scale: bool = True,
    padding_idx: int | None = None,
    dropout: float = 0.1,
) -> FrontEnd:
    """Tokens scaled by sqrt(D) + positions, dropout once after the sum (Vaswani et al. 2017)."""
    return FrontEnd(
        FrontEndConfig(
            family="transformer",
            vocab_size=vocab_size,
            d_model=d_model,
            max_len=max_len,
            positions=positions,
            token_scale=math.sqrt(d_model) if scale else 1.0,
            padding_idx=padding_idx,
            dropout=dropout,
        )
    )


def bert_embedding(
    vocab_size: int,
    d_model: int,
    max_len: int,
    segments: int = 2,
    padding_idx: int | None = 0,
    norm_eps: float = 1e-12,
    dropout: float = 0.1,
) -> FrontEnd:
    """Tokens + segments + learned positions, LayerNorm, dropout (Devlin et al. 2018)."""
    return FrontEnd(
        FrontEndConfig(
            family="bert",
            vocab_size=vocab_size,
            d_model=d_model,
            max_len=max_len,
            segments=segments,
            norm_eps=norm_eps,
            padding_idx=padding_idx,
            dropout=dropout,
        )
    )


def gpt2_embedding(vocab_size: int, d_model: int, max_len: int, dropout: float = 0.1) -> FrontEnd:
    """Tokens + learned positions, no norm (Radford et al. 2019)."""
    return FrontEnd(
        FrontEndConfig(family="gpt2", vocab_size=vocab_size, d_model=d_model, max_len=max_len, dropout=dropout)
    )
