"""The front-ends that everybody trains: the original Transformer's, BERT's and GPT-2's; and some of other positions.

Letters: D model width.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from preblock.models.frontend import FrontEnd, FrontEndConfig
from preblock.models.steps import Levels, Norm, Positions, Scale, Segments, Step, Tokens


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
    table = "learned" if positions == "learned" else "exact"
    steps: list[Step] = [Tokens(rows=vocab_size, width=d_model)]
    if scale:
        steps.append(Scale(by=math.sqrt(d_model)))
    steps.append(Positions(rows=max_len, table=table))
    return _build("transformer", steps, max_len, padding_idx=padding_idx, dropout=dropout)


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
    steps: list[Step] = [Tokens(rows=vocab_size, width=d_model)]
    if segments:
        steps.append(Segments(rows=segments))
    steps += [Positions(rows=max_len), Norm(eps=norm_eps)]
    return _build("bert", steps, max_len, padding_idx=padding_idx, consumer_scales=False, dropout=dropout)


def gpt2_embedding(vocab_size: int, d_model: int, max_len: int, dropout: float = 0.1) -> FrontEnd:
    """Tokens + learned positions, no norm (Radford et al. 2019)."""
    steps = [Tokens(rows=vocab_size, width=d_model), Positions(rows=max_len)]
    return _build("gpt2", steps, max_len, consumer_scales=False, dropout=dropout)


def hybrid_embedding(vocab_size: int, d_model: int, rows: int, max_len: int, dropout: float = 0.1) -> FrontEnd:
    """Tokens + positions whose first `rows` are learned, and those beyond exact sinusoids."""
    steps = [Tokens(rows=vocab_size, width=d_model), Positions(table="hybrid", rows=rows)]
    return _build("hybrid", steps, max_len, dropout=dropout)


def grid_embedding(
    vocab_size: int,
    d_model: int,
    grid: tuple[int, int],
    positions: Literal["learned", "sinusoidal", "factorised"] = "learned",
    dropout: float = 0.1,
) -> FrontEnd:
    """Tokens + positions in two dimensions; the tokens are the cells of a grid of (rows, columns), row by row."""
    cells = grid[0] * grid[1]
    table = "exact" if positions == "sinusoidal" else positions
    steps = [Tokens(rows=vocab_size, width=d_model), Positions(rows=cells, table=table, grid=grid)]
    return _build("grid", steps, cells, dropout=dropout)


def hierarchical_embedding(vocab_size: int, d_model: int, levels: Mapping[str, int], dropout: float = 0.1) -> FrontEnd:
    """Tokens + one vector per level (name -> rows), whose index is an input of that name (Bai et al. 2021)."""
    step = Levels(levels=tuple(Segments(rows=rows, input=name) for name, rows in levels.items()))
    return _build("hierarchical", [Tokens(rows=vocab_size, width=d_model), step], None, dropout=dropout)


def _build(family: str, steps: list[Any], max_len: int | None, **values: Any) -> FrontEnd:
    return FrontEnd(FrontEndConfig(family=family, steps=tuple(steps), max_len=max_len, **values))
