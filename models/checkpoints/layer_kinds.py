"""Kinds of attention layers in models that mix full and sliding attention, from their configuration."""

from collections.abc import Callable
from typing import Any

from preblock.models.checkpoints.family import Config

FULL, SLIDING = "full_attention", "sliding_attention"


def alternating_kinds(
    layers: int, key: str | None, distance: int, first_full: Callable[[int], int]
) -> Callable[[Config], set[str]]:
    """Return a function from the configuration to the kinds of its layers.

    `layer_types` names the kind of each layer. Older files hold the distance between layers of full attention instead.

    Args:
        layers: default number of layers.
        key: key of the distance; None if the library reads none.
        distance: its default.
        first_full: index of the first layer of full attention, given the distance.

    """

    def kinds(c: Config) -> set[str]:
        stated = c("layer_types")
        if stated is None:
            number = _count("num_hidden_layers", c("num_hidden_layers", layers))
            step = distance if key is None else _count(key, c(key, distance))
            full = first_full(step)
            found = {FULL} if full < number else set()
            other = 0 if full else 1
            return found | ({SLIDING} if step > 1 and other < number else set())
        if not isinstance(stated, list) or not stated or not all(kind in (FULL, SLIDING) for kind in stated):
            raise ValueError(f"layer_types: got {stated!r}, expected a list of {FULL} and {SLIDING}")
        return set(stated)

    return kinds


def _count(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}: got {value!r}, expected 1 or more")
    return value
