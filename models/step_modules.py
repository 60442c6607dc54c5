"""The PyTorch module of each step of a front-end, and of its attention bias."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from preblock.models.config import FrontEndConfig
from preblock.models.modules.alibi import AlibiBias
from preblock.models.modules.bias import AlibiConfig, BiasConfig, RelativeSinusoidConfig, T5Config
from preblock.models.modules.grid import FactorisedCells, SinusoidalGridEncoding
from preblock.models.modules.hybrid_positions import HybridPositionalEncoding
from preblock.models.modules.initialisers import Initialiser
from preblock.models.modules.positions import (
    FixedPositionalEncoding,
    LearnedPositionalEncoding,
    SinusoidalPositionalEncoding,
)
from preblock.models.modules.relative_positions import RelativeSinusoid, T5RelativeBias
from preblock.models.modules.tokens import TokenEmbedding
from preblock.models.sinusoid_tables import library_table
from preblock.models.steps import Levels, Norm, Positions, Project, RmsNorm, Segments, Step, Tokens, Weights


def build_module(step: Step, width: int, config: FrontEndConfig, init: Initialiser, std: float) -> nn.Module | None:
    """Return the module of a step of `config`; None for a step without one.

    Args:
        step: one of the steps of `config`.
        width: width of the vectors entering the step.
        config: configuration of the whole front-end.
        init: initial values of the tables, a name of `INITIALISERS`.
        std: standard deviation of `init="normal"`.

    Raises:
        ValueError: a size or `init` is not allowed.

    """
    match step:
        case Tokens():
            return TokenEmbedding(step.rows, step.width, padding_idx=config.padding_idx, init=init, std=std)
        case Weights():
            return TokenEmbedding(step.rows, 1, init=torch.ones(step.rows, 1))
        case Segments():
            return TokenEmbedding(step.rows, width, init=init, std=std) if step.table == "own" else None
        case Levels():
            own = {str(place): level.rows for place, level in enumerate(step.levels) if level.table == "own"}
            return nn.ModuleDict(
                {place: TokenEmbedding(rows, width, init=init, std=std) for place, rows in own.items()}
            )
        case Positions(grid=(height, columns), table="factorised"):
            return FactorisedCells(width, height, columns, init, std)
        case Positions(grid=(height, columns), table="exact"):
            return FixedPositionalEncoding(partial(_grid_table, width, height, columns))
        case Positions(table="hybrid"):
            return HybridPositionalEncoding(width, step.rows, dropout=0.0, init=init, std=std)
        case Positions(table="learned"):
            return LearnedPositionalEncoding(width, step.rows, dropout=0.0, init=init, std=std)
        case Positions(table="exact"):
            return SinusoidalPositionalEncoding(width, step.rows, dropout=0.0)
        case Positions():
            return FixedPositionalEncoding(partial(_rounded_table, step, width, config.arithmetic))
        case Norm():
            return nn.LayerNorm(width, eps=step.eps, bias=step.bias is not None)
        case RmsNorm():
            return nn.RMSNorm(width, eps=step.eps, elementwise_affine=step.weight is not None)
        case Project():
            return nn.Linear(width, step.width, bias=step.bias is not None)
        case _:
            return None


def _grid_table(width: int, height: int, columns: int) -> NDArray[np.float32]:
    with torch.device("cpu"):
        cells = torch.zeros((1, height * columns), dtype=torch.int64)
        table: NDArray[np.float32] = SinusoidalGridEncoding(width, height, columns)(cells)[0].numpy()
    return table


def _rounded_table(step: Positions, width: int, arithmetic: str) -> NDArray[np.float32]:
    table = torch.from_numpy(library_table(step.table, step.rows, width, step.zero_row))
    rounded: NDArray[np.float32] = table.to(getattr(torch, arithmetic)).to(torch.float32).numpy()
    return rounded


Bias = AlibiBias | T5RelativeBias | RelativeSinusoid


def build_bias(config: BiasConfig) -> Bias:
    """Return the module of a pairwise attention bias.

    Raises:
        ValueError: the module does not allow a value.

    """
    match config:
        case AlibiConfig():
            return AlibiBias(config.heads, config.anchor, config.recipe, config.arithmetic, config.divisor)
        case T5Config():
            return T5RelativeBias(config.heads, config.buckets, config.max_distance, config.bidirectional)
        case RelativeSinusoidConfig():
            return RelativeSinusoid(config.width, config.clamp_len, config.bidirectional)
