"""Constructors of steps by the names of their tensors: the vocabulary of the family table."""

import math
from collections.abc import Callable
from typing import Any

from preblock.models.families.published_config import Config
from preblock.models.steps import Norm, Positions, Project, Scale, Segments, Step, Tokens

MAX_SINUSOIDS = 2**17
"""Most positions of a derived table: 64 times the largest known. A larger one would fill the memory."""


MAX_COUNT = 2**31
"""Largest count of a config: of heads, columns, or buckets."""


def weight_keys(*names: str, suffix: str = ".weight") -> tuple[str, ...]:
    """Return the keys of a tensor with several names."""
    return tuple(name + suffix for name in names)


def norm_step(name: str, eps: float, *, bias: bool = True, spellings: tuple[str, ...] = ()) -> Norm:
    """Return a LayerNorm; old files call the weight of a module `LayerNorm` gamma, and its bias beta."""

    def keys(old: str, current: str) -> tuple[str, ...]:
        # With both names in a file, the old one counts in transformers.
        endings = {name: (old, current) if name.endswith("LayerNorm") else (current,) for name in (name, *spellings)}
        return tuple(name + ending for name, own in endings.items() for ending in own)

    return Norm(eps=eps, weight=keys(".gamma", ".weight"), bias=keys(".beta", ".bias") if bias else None)


def project_step(name: str, *, bias: bool = True) -> Project:
    """Return a projection."""
    return Project(weight=weight_keys(name), bias=weight_keys(name, suffix=".bias") if bias else None)


def token_step(*names: str) -> Tokens:
    """Return the token table, under any of several names."""
    return Tokens(weight=weight_keys(*names))


def segment_step(name: str) -> Segments:
    """Return a table of segments."""
    return Segments(weight=weight_keys(name))


def when(condition: Any, step: Step) -> list[Step]:
    """Return a step if `condition` holds, else nothing."""
    return [step] if condition else []


def chosen_segment_steps(c: Config, by: float = 1.0) -> list[Step]:
    """Return segments from rows of the token table if the caller chose them, else nothing."""
    return when(c.segments, Segments(table="tokens", by=by, needed=True))


def learned_position_step(*names: str, first: int = 0) -> Positions:
    """Return learned positions; `first` is the row of the first token."""
    return Positions(weight=weight_keys(*names), first=first)


def unpadded_position_step(name: str, padding: int) -> Positions:
    """Return learned positions counted by non-padding ids; the first real token takes row padding + 1."""
    return Positions(weight=weight_keys(name), counts="ids", first=padding + 1)


def sinusoid_position_step(c: Config, table: str, limit: str, default: int, **values: Any) -> Positions:
    """Return sinusoidal positions; the first row of their table is position 0 unless `values` has `first`."""
    rows = count(c, default, limit, MAX_SINUSOIDS)
    return Positions(rows=rows + values.get("first", 0), table=table, **values)


def counted_sinusoid_step(c: Config, limit: str) -> Positions:
    """Return sinusoidal positions counted by non-padding ids; the first real token takes row padding + 1."""
    padding = c("pad_token_id", 1)
    return sinusoid_position_step(c, "tensor2tensor", limit, 1024, counts="ids", first=padding + 1, zero_row=padding)


def root_scale(c: Config, default: int | None = None, key: str = "hidden_size", *, cast: bool = False) -> Scale:
    """Return the embedding scale of most models: the root of the width in the config."""
    return Scale(by=math.sqrt(count(c, default, key)), cast=cast)


def count(c: Config, default: int | None, key: str, most: int = MAX_COUNT) -> Any:
    """Return a count, or the default; raise ValueError for another value than 1 to `most`."""
    value = c(key, default)
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise ValueError(f"{key}: got {value!r}, expected 1 to {most}")
    return value


def count_lookup_steps(default: bool) -> Callable[[Config], int]:
    """Return how many steps the model's own lookup has: with `scale_embedding` its table scales the vectors itself."""
    return lambda c: 2 if c("scale_embedding", default) else 1
