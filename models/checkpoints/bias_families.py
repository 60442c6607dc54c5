"""The bias table: attention biases of published models. Rows are named as in `families.py`.

Read from transformers 5.24, and checked against it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from preblock.models.checkpoints.family import Config
from preblock.models.modules.bias import AlibiConfig, BiasConfig, RelativeSinusoidConfig, T5Config


@dataclass(frozen=True, kw_only=True)
class BiasFamily:
    """One row of BIASES.

    Args:
        config: function from the config to the bias; None if the model has none.
        only: keys with an effect on the bias -> their supported values. A dot leads into an object.

    """

    config: Callable[[Config], BiasConfig | None]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def _count(c: Config, default: int, *names: str) -> int:
    """Return a count with several names; raise an error if their values differ."""
    stated = {name: c(name) for name in names if c(name) is not None}
    for name, value in stated.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}, understood is 1 or more")
        if value != next(iter(stated.values())):
            raise ValueError(
                f"{name} is {value!r}, understood is {next(iter(stated.values()))}, as {next(iter(stated))}"
            )
    return next(iter(stated.values()), default)


def _falcon(c: Config) -> AlibiConfig | None:
    if not c("alibi", False):
        return None
    heads = _count(c, 71, "num_attention_heads")
    return AlibiConfig(
        heads=heads,
        anchor="first",
        recipe="float32_powers",
        arithmetic="bfloat16",
        divisor=math.sqrt(_count(c, 4544, "hidden_size", "n_embed") // heads),
    )


def _t5(side: str) -> BiasFamily:
    return BiasFamily(
        config=lambda c: T5Config(
            heads=_count(c, 8, "num_heads", "num_attention_heads"),
            buckets=_count(c, 32, "relative_attention_num_buckets"),
            max_distance=_count(c, 128, "relative_attention_max_distance"),
            bidirectional=side == "encoder",
            weight=(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        )
    )


def _xlnet(c: Config) -> RelativeSinusoidConfig:
    clamp_len = c("clamp_len", -1)
    return RelativeSinusoidConfig(
        width=_count(c, 1024, "d_model", "hidden_size"),
        clamp_len=clamp_len if clamp_len > 0 else None,
        bidirectional=c("attn_type", "bi") == "bi",
    )


BIASES: dict[str, BiasFamily] = {
    "bloom": BiasFamily(
        config=lambda c: AlibiConfig(
            heads=_count(c, 8, "n_head", "num_attention_heads"), anchor="first", recipe="float32_powers"
        )
    ),
    # The library always adds ALiBi with a maximum of 8, and ignores the config. If the config differs, the model was
    # trained with another bias.
    "mpt": BiasFamily(
        config=lambda c: AlibiConfig(
            heads=_count(c, 16, "n_heads", "num_attention_heads"), anchor="last", recipe="float32_reciprocals"
        ),
        only={"attn_config.alibi": (True,), "attn_config.alibi_bias_max": (8,)},
    ),
    # Once, as its default attention adds it; the library's eager attention adds it twice.
    "falcon": BiasFamily(config=_falcon, only={"alibi": (True, False)}),
    "t5/encoder": _t5("encoder"),
    "t5/decoder": _t5("decoder"),
    # With bi_data, each half of a batch reads the distances in another direction.
    "xlnet": BiasFamily(config=_xlnet, only={"attn_type": ("bi", "uni"), "bi_data": (False,)}),
}


def bias_of(name: str, values: Mapping[str, Any]) -> BiasConfig | None:
    """Return the pairwise bias of a model; None without one.

    Args:
        name: name of a row of the family table.
        values: content of its `config.json`.

    Raises:
        ValueError: a value is not understood; the error names it.

    """
    row = BIASES.get(name)
    if row is None:
        return None
    for key, understood in row.only.items():
        value = _find(values, key)
        if value is not None and value not in understood:
            raise ValueError(f"{key} is {value!r}, understood is {' or '.join(map(repr, understood))}")
    return row.config(Config(values))


def _find(values: Mapping[str, Any], key: str) -> Any:
    name, _, rest = key.partition(".")
    value = values.get(name)
    if not rest or value is None:
        return value
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, understood is an object")
    return _find(value, rest)
