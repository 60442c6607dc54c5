"""Trainable front-ends: the original Transformer, BERT, GPT-2, and some with other positions.

Each class is a `FrontEnd` with a constructor in the terms of its paper.
Letters: B batch, L length, D model width, V vocabulary, M maximum length.
"""

import math
from collections.abc import Mapping
from typing import Literal

from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.modules.initialisers import DEFAULT_STD, Initialiser
from preblock.models.steps import Levels, Norm, Positions, Scale, Segments, Step, Tokens


class TransformerEmbedding(FrontEnd):
    """Tokens scaled by sqrt(D) + positions, dropout once after the sum (Vaswani et al. 2017, section 3.4).

    Args:
        vocab_size: V; legal ids are 0 to V - 1.
        d_model: width D of a vector; even with sinusoidal positions.
        max_len: M, the largest legal offset + L of a learned table. Sinusoids have no limit in PyTorch; there M is the
            limit of an export.
        positions: "sinusoidal" as in the paper, or "learned"; default "sinusoidal".
        scale: multiply the token vectors by sqrt(D); default True.
        padding_idx: id whose row starts at zero and gets no gradient; default none.
        dropout: probability; default 0.1.
        init: initial values of the learned tables, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: a size, `positions` or `init` is not allowed.

    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        max_len: int,
        positions: Literal["learned", "sinusoidal"] = "sinusoidal",
        scale: bool = True,
        padding_idx: int | None = None,
        dropout: float = 0.1,
        init: Initialiser = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        if positions not in ("sinusoidal", "learned"):
            raise ValueError(f"positions: got {positions!r}, expected sinusoidal, learned")
        steps: list[Step] = [Tokens(rows=vocab_size, width=d_model)]
        if scale:
            steps.append(Scale(by=math.sqrt(d_model)))
        steps.append(Positions(rows=max_len, table="learned" if positions == "learned" else "exact"))
        config = FrontEndConfig(
            family="transformer", steps=tuple(steps), max_len=max_len, padding_idx=padding_idx, dropout=dropout
        )
        super().__init__(config, init, std)


class BertEmbeddings(FrontEnd):
    """Tokens + segments + learned positions, LayerNorm, dropout (Devlin et al. 2018, section 3).

    Args:
        vocab_size: V; legal ids are 0 to V - 1.
        d_model: width D of a vector.
        max_len: M, the largest legal offset + L.
        segments: rows of the segment table; default 2, and 0 for no segments.
        padding_idx: id whose row starts at zero and gets no gradient, or None; default 0.
        norm_eps: epsilon of the LayerNorm; default 1e-12.
        dropout: probability; default 0.1.
        init: initial values of the tables, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: a size or `init` is not allowed.

    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        max_len: int,
        segments: int = 2,
        padding_idx: int | None = 0,
        norm_eps: float = 1e-12,
        dropout: float = 0.1,
        init: Initialiser = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        steps: list[Step] = [Tokens(rows=vocab_size, width=d_model)]
        if segments:
            steps.append(Segments(rows=segments))
        steps += [Positions(rows=max_len), Norm(eps=norm_eps)]
        config = FrontEndConfig(
            family="bert",
            steps=tuple(steps),
            max_len=max_len,
            padding_idx=padding_idx,
            consumer_scales=False,
            dropout=dropout,
        )
        super().__init__(config, init, std)


class GPT2Embeddings(FrontEnd):
    """Tokens + learned positions, no norm (Radford et al. 2019, section 2.3).

    Args:
        vocab_size: V; legal ids are 0 to V - 1.
        d_model: width D of a vector.
        max_len: M, the largest legal offset + L.
        dropout: probability; default 0.1.
        init: initial values of the tables, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: a size or `init` is not allowed.

    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        max_len: int,
        dropout: float = 0.1,
        init: Initialiser = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        steps = (Tokens(rows=vocab_size, width=d_model), Positions(rows=max_len))
        config = FrontEndConfig(family="gpt2", steps=steps, max_len=max_len, consumer_scales=False, dropout=dropout)
        super().__init__(config, init, std)


class HybridEmbedding(FrontEnd):
    """Tokens + positions: learned ones first, sinusoids beyond them (Gehring et al. 2017; Vaswani et al. 2017).

    Args:
        vocab_size: V; legal ids are 0 to V - 1.
        d_model: width D of a vector; even.
        rows: number of learned positions.
        max_len: M, the largest legal offset + L; may exceed `rows`.
        dropout: probability; default 0.1.
        init: initial values of the tables, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: a size or `init` is not allowed.

    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        rows: int,
        max_len: int,
        dropout: float = 0.1,
        init: Initialiser = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        steps = (Tokens(rows=vocab_size, width=d_model), Positions(table="hybrid", rows=rows))
        super().__init__(FrontEndConfig(family="hybrid", steps=steps, max_len=max_len, dropout=dropout), init, std)


class GridEmbedding(FrontEnd):
    """Tokens + positions in two dimensions; the tokens are the cells of a grid, row by row (Parmar et al. 2018).

    Args:
        vocab_size: V; legal ids are 0 to V - 1.
        d_model: width D of a vector; a multiple of 4 with sinusoidal positions.
        grid: rows and columns of the grid; M is their product.
        positions: "learned" for a vector per cell, "factorised" for a vector per row plus one per column, or
            "sinusoidal"; default "learned".
        dropout: probability; default 0.1.
        init: initial values of the learned tables, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: a size or `init` is not allowed.

    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        grid: tuple[int, int],
        positions: Literal["learned", "sinusoidal", "factorised"] = "learned",
        dropout: float = 0.1,
        init: Initialiser = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        cells = grid[0] * grid[1]
        table = "exact" if positions == "sinusoidal" else positions
        steps = (Tokens(rows=vocab_size, width=d_model), Positions(rows=cells, table=table, grid=grid))
        super().__init__(FrontEndConfig(family="grid", steps=steps, max_len=cells, dropout=dropout), init, std)


class HierarchicalEmbedding(FrontEnd):
    """Tokens + one vector per level: paragraph, sentence, word (Bai et al. 2021). It has no maximum length.

    Args:
        vocab_size: V; legal ids are 0 to V - 1.
        d_model: width D of a vector.
        levels: name of each level -> rows of its table. `forward` takes the indices of a level by its name.
        dropout: probability; default 0.1.
        init: initial values of the tables, a name of `INITIALISERS`; default "normal".
        std: standard deviation of `init="normal"`; default 0.02.

    Raises:
        ValueError: `levels` is empty, or a name, a size or `init` is not allowed.

    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        levels: Mapping[str, int],
        dropout: float = 0.1,
        init: Initialiser = "normal",
        std: float = DEFAULT_STD,
    ) -> None:
        step = Levels(levels=tuple(Segments(rows=rows, input=name) for name, rows in levels.items()))
        steps = (Tokens(rows=vocab_size, width=d_model), step)
        super().__init__(FrontEndConfig(family="hierarchical", steps=steps, max_len=None, dropout=dropout), init, std)
