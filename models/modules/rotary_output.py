"""Rotary outputs of a front-end as plain values: the names and the angles of a pair of cosines and sines."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import numpy as np

from preblock.models.modules.rotary_config import RotaryConfig, attention_factor
from preblock.models.serialization import Rule, check_fields, check_names, with_tuples

AXES = 3
"""Axes of three-dimensional positions."""
Ending = Annotated[
    str, Rule(lambda name: bool(re.fullmatch("[a-z][a-z0-9_]*|", str(name))), "lower-case letters, digits and '_'")
]
OWN = ("name", "layout", "form", "dtype", "axes")
"""Fields of `RotaryOutput` beside those of `RotaryConfig`."""


@dataclass(frozen=True, kw_only=True)
class RotaryOutput:
    """A pair of further outputs of a front-end: cosines and sines for attention.

    Args:
        name: ending of the names of the two outputs, after "_": the type of layer if layers differ; default "",
            for `rotary_cos` and `rotary_sin`.
        layout: layout of the pairs of columns, as in `rotate`; default "half".
        axes: axis of each of the R/2 pairs, for three-dimensional positions: 0 for time, 1 for height, 2 for width.
            The module itself has one position for all axes. Default (), one axis.
        form: columns of the outputs: "full" for each of the R/2 values twice, "half" for each value once, "fused" for
            one output with R/2 cosines and then R/2 sines; default "full".
        dtype: type of the outputs: "float16" rounds the float32 values once, to nearest, ties to even; default
            "float32".
        config: configuration of the angles.

    Raises:
        ValueError: the name, the layout, the form, the dtype or the axes are not allowed; or the factor on cosines
            and sines exceeds the dtype.

    """

    config: RotaryConfig
    name: Ending = ""
    layout: Literal["half", "interleaved"] = "half"
    form: Literal["full", "half", "fused"] = "full"
    dtype: Literal["float32", "float16"] = "float32"
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "rotary.")
        largest, limit = attention_factor(self.config), float(np.finfo(np.float16).max)
        if self.dtype == "float16" and largest > limit:
            raise ValueError(f"rotary.dtype: got 'float16', expected 'float32' for values above {limit:g}")
        pairs = self.config.dim // 2
        given: Any = self.axes
        if given and (not isinstance(given, tuple) or len(given) != pairs or not {*given} <= set(range(AXES))):
            raise ValueError(f"rotary.axes: got {given!r}, expected {pairs} numbers from 0 to {AXES - 1}, or none")

    def named(self, part: str) -> str:
        """Return `part` with the ending: rotary_cos, rotary_cos_full_attention."""
        return f"{part}_{self.name}" if self.name else part

    @property
    def names(self) -> tuple[str, str]:
        """Names of the outputs with cosines and with sines; the same for the fused form."""
        parts = ("rotary_cos_sin",) * 2 if self.form == "fused" else ("rotary_cos", "rotary_sin")
        return self.named(parts[0]), self.named(parts[1])

    @property
    def columns(self) -> int:
        """Columns of an output."""
        return self.config.dim // 2 if self.form == "half" else self.config.dim

    def to_document(self) -> dict[str, Any]:
        """Return plain values, without numbers at their defaults."""
        numbers = {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self.config)
            if (value := getattr(self.config, field.name)) != field.default or field.name in ("theta", "scaling")
        }
        chosen = {"form": self.form, "dtype": self.dtype}
        further = {name: value for name, value in chosen.items() if value not in ("full", "float32")}
        axes = {"axes": [*map(int, self.axes)]} if self.axes else {}
        return {"name": self.name, "layout": self.layout, **further, **axes, **numbers}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "RotaryOutput":
        """Return the output of a document from `to_document`.

        Raises:
            ValueError: a field is not known, or its value not allowed.

        """
        values = with_tuples(document)
        own = {name: values.pop(name) for name in OWN if name in values}
        check_names("rotary.", values, [*OWN, *(field.name for field in fields(RotaryConfig))])
        if "dim" not in values:
            raise ValueError("rotary.dim: got none, expected an even width of 2 or more")
        return cls(config=RotaryConfig(**values), **own)
