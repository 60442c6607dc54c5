"""Kinds of attention layers in models that mix full and sliding attention, from their configuration."""

from collections.abc import Callable, Mapping
from typing import Any

from preblock.models.families.named_steps import count
from preblock.models.families.published_config import Config

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 2**16


def alternating_kinds(
    layers: int, key: str | None, distance: int, begins_full: bool = False, last_full: bool = False
) -> Callable[[Config], list[str]]:
    """Return a function from the configuration to the kind of each of its layers.

    `layer_types` names the kind of each layer. Older files hold the distance between layers of full attention instead.

    Args:
        layers: default number of layers.
        key: key of the distance; None if the library reads none.
        distance: its default.
        begins_full: the first layer has full attention; default False, the last of the first distance.
        last_full: the last layer has full attention in any case; default False.

    """

    def kinds(c: Config) -> list[str]:
        stated = c("layer_types")
        if stated is None:
            number = count(c, layers, "num_hidden_layers", MAX_LAYERS)
            step = distance if key is None else count(c, distance, key, MAX_LAYERS)
            first = 0 if begins_full else step - 1
            stated = [FULL if layer % step == first else SLIDING for layer in range(number)]
        if not isinstance(stated, list) or not stated or not all(kind in (FULL, SLIDING) for kind in stated):
            raise ValueError(f"layer_types: got {stated!r}, expected a list of {FULL} and {SLIDING}")
        return [*stated[:-1], FULL] if last_full else stated

    return kinds


def head_widths(
    kinds: Callable[[Config], list[str]], width: int, full_width: int
) -> Callable[[Config], Mapping[str, Any]]:
    """Return a function from the configuration to the width of a head in each kind of layer.

    `per_layer_config` holds the values of single layers. Older files hold the width for full attention instead.

    Args:
        kinds: as `alternating_kinds` returns it.
        width: default of `head_dim`.
        full_width: default of `global_head_dim`.

    """

    def widths(c: Config) -> Mapping[str, Any]:
        layers = kinds(c)
        full = {"head_dim": c.nullable("global_head_dim", full_width)}
        older = {layer: full for layer, kind in enumerate(layers) if kind == FULL}
        changes = _layer_changes(c.nullable("per_layer_config", older), len(layers))
        found: dict[str, Any] = {}
        for layer, kind in enumerate(layers):
            stated = changes.get(layer, {}).get("head_dim", c.nullable("head_dim", width))
            if found.setdefault(kind, stated) != stated:
                raise ValueError(
                    f"head_dim: got {found[kind]!r} and {stated!r} in layers of {kind}, expected one width"
                )
        return found

    return widths


def _layer_changes(stated: Any, layers: int) -> dict[int, Mapping[str, Any]]:
    """Return the values of single layers by their index."""
    given = {} if stated is None else stated
    legal = set(range(layers))
    if not isinstance(given, Mapping) or not all(
        str(key).isdecimal() and int(key) in legal and isinstance(values, Mapping) for key, values in given.items()
    ):
        expected = f"objects with values for layers from 0 to {layers - 1}"
        raise ValueError(f"per_layer_config: got {stated!r}, expected {expected}")
    return {int(key): values for key, values in given.items()}
