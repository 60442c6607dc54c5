"""Reads the rotary part of a `config.json` by the rotary part of its row.

Letters: R rotary width, M maximum length.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.models.families.layer_kinds import FULL, SLIDING
from preblock.models.families.published_config import Config
from preblock.models.families.rotary import Rotary
from preblock.models.modules.rotary_config import (
    MAX_WIDTH,
    SCALINGS,
    RotaryConfig,
    attention_factor,
    rotary_frequencies,
    yarn_scale,
)
from preblock.models.modules.rotary_output import RotaryOutput

OWN_NUMBERS = {"original_len", "length", "turning_pairs", "frequencies"}
"""Numbers of `RotaryConfig` that are no keys of a file."""
SCALING_KEYS = {key for scaling in SCALINGS.values() for key in (*scaling.needs, *scaling.takes)} - OWN_NUMBERS
SCALING_KEYS |= {"original_max_position_embeddings", "mscale", "mscale_all_dim"}
"""Keys that the library does not read with the type "default"."""
NTK_ALPHA_KEYS = {"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
"""Keys of files with a fixed stretch of theta; the library reads the first alone."""
ROUNDING = 2.0**-23
"""One unit in the last place of 1 in float32: the tolerance for a table from another machine."""


def read_rotary(
    row: Rotary, values: Mapping[str, Any], width: int, longest: int, length: int | None = None
) -> tuple[RotaryOutput, ...]:
    """Translate the rotary part of a `config.json`, of transformers 5 (`rope_parameters`) or older.

    Args:
        row: row of its family.
        values: content of the whole file.
        width: the hidden size.
        longest: its longest input.
        length: as in `RotaryConfig`, for "dynamic" and "longrope"; the other scalings do not depend on it.

    Raises:
        MissingLengthError: a rope type depends on the length, and none is given.
        ValueError: a rope type or a key beside it is not known, or a number is missing or out of range.

    """
    config = Config(values)
    used = row.layers(config) if row.layers else row.thetas
    interleaved = row.interleaved is None or config.nullable(row.interleaved, True)
    layout = row.layout if interleaved else "half"
    outputs = []
    for name, rope in _rope_parameters(row, values, [name for name in row.thetas if name in used]).items():
        sections = _sections(row, rope)
        angles = _read_one(row, name, rope, values, width, longest, length)
        axes = _axes(sections, row.order, angles.dim // 2)
        outputs.append(RotaryOutput(name=name, layout=layout, axes=axes, config=angles))
    return tuple(outputs)


def _sections(row: Rotary, rope: dict[str, Any]) -> tuple[int, ...]:
    """Take the pairs of each axis out of `rope`; () for one axis."""
    if not row.sections:
        return ()
    if row.order == "mixed":
        rope.pop("mrope_interleaved", None)  # the library does not read it
    stated = rope.pop("mrope_section", row.sections)
    if not isinstance(stated, list | tuple) or not all(type(pairs) is int and pairs >= 0 for pairs in stated):
        raise ValueError(f"mrope_section: got {stated!r}, expected a list of three numbers")
    return tuple(stated)


def _axes(sections: tuple[int, ...], order: str, pairs: int) -> tuple[int, ...]:
    """Return the axis of positions of each pair of columns: 0 to 2; () for one axis."""
    if not sections:
        return ()
    if order != "mixed" and sum(sections) != pairs:
        raise ValueError(f"mrope_section: got {list(sections)}, expected numbers with the sum {pairs}")
    if order == "sections":
        return tuple(place % 3 for place, size in enumerate(sections) for _ in range(size))
    if order == "time_last":
        if len(sections) != 3 or sections[0] != sections[1] or not sections[2]:
            expected = "three numbers, as many pairs for height as for width, and some for time"
            raise ValueError(f"mrope_section: got {list(sections)}, expected {expected}")
        return (1, 2) * sections[0] + (0,) * sections[2]
    if len(sections) < 3:
        raise ValueError(f"mrope_section: got {list(sections)}, expected three numbers")
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], pairs), 3):
            axes[pair] = axis
    return tuple(axes)


class MissingLengthError(ValueError):
    """The rope type depends on the length of the whole sequence, and none was given."""


def _rope_parameters(row: Rotary, values: Mapping[str, Any], used: list[str]) -> dict[str, dict[str, Any]]:
    """Return the values in the file for each rope in `used`, by the keys that the library reads."""
    new, old = (_mapping(key, values.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    if not row.types:
        return {name: {} for name in used}
    if "" in row.thetas:
        stated = dict(old or new or (row.default if values.get("rope_parameters") is None else {}))
        if not row.strict:
            stated = {key: value for key, value in stated.items() if key not in (FULL, SLIDING)}
        return {"": stated}
    if not row.scaled:  # the library reads one of both, whole
        key = "rope_scaling" if "rope_scaling" in values else "rope_parameters"
        absent = key == "rope_parameters" and values.get(key) is None
        whole = row.default if absent else _mapping(key, values[key])
        return {name: dict(_mapping(f"{key}.{name}", whole.get(name))) for name in used}
    if values.get("rope_parameters") is None:
        new = row.default
    unread = new.keys() - row.thetas.keys()
    if unread and (row.strict or (values.get("rope_scaling") is not None and FULL not in new)):
        raise ValueError(f"rope_parameters: got the key {min(unread)!r}, expected {', '.join(row.thetas)}")
    ropes = {name: dict(_mapping(name, new.get(name) or {"rope_type": "default"})) for name in used}
    for name in {*row.scaled} & {*used}:
        ropes[name].update({key: value for key, value in old.items() if key not in row.thetas})
    return ropes


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: got {value!r}, expected a JSON object")
    return value


def _read_one(
    row: Rotary,
    name: str,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    width: int,
    longest: int,
    length: int | None,
) -> RotaryConfig:
    config = Config(values)
    rope = {key: value for key, value in given.items() if value is not None}
    scaling = _rope_type(row, rope)
    if scaling == "yarn" and given.get("truncate", True) is None:
        rope["truncate"] = False  # as the library reads null
    key, default = row.thetas[name]
    theta = _number("rope_theta", rope.pop("rope_theta", config(key, default) if key else default))
    is_fixed = row.ntk_alpha and scaling == "dynamic" and bool(rope.get("alpha"))
    share = _share(row, rope, config, "default" if is_fixed else scaling)
    # With "proportional" a part of the pairs turns, and all columns of a head have values.
    dim = _rotary_width(row, name, config, width, 1.0 if scaling == "proportional" else share)
    if is_fixed:
        scaling, theta = "default", theta * _number("alpha", rope["alpha"]) ** (dim / (dim - 2))
        rope = {key: value for key, value in rope.items() if key not in NTK_ALPHA_KEYS}
    scale = SCALINGS[scaling]
    keys = {*scale.needs, *scale.takes} - OWN_NUMBERS
    numbers: dict[str, Any] = {key: _number(key, rope.pop(key)) for key in keys & set(rope)}
    if scaling == "default":
        rope = {key: value for key, value in rope.items() if key not in SCALING_KEYS}
    if scaling == "proportional":
        numbers |= {"factor": numbers.get("factor", 1.0), "turning_pairs": _turning_pairs(share, dim)}
    if "original_len" in scale.needs:
        original = longest if scaling == "dynamic" else _original_length(row, name, rope, config, longest)
        _add_scaled(scaling, rope, numbers, longest, original)
    if row.mscales and scaling == "longrope":
        scales = [_number(key, rope.pop(key, None)) for key in ("short_mscale", "long_mscale")]
        numbers["attention_factor"] = scales[length is not None and length > numbers["original_len"]]
        numbers["long_factor"] = numbers["short_factor"]
    # The library looks for `truncate` in the wrong place, and rounds in either case.
    if rope or (name and not numbers.get("truncate", True)):
        unknown = min(rope, default="truncate")
        raise ValueError(f"rope_parameters: got the key {unknown!r}, not known with rope_type {scaling!r}")
    if "length" in scale.needs:
        if length is None:
            raise MissingLengthError(
                f"rope_type {scaling!r} depends on the length of the whole sequence, and none was given"
            )
        numbers["length"] = length
    return RotaryConfig(dim=dim, theta=theta, scaling=scaling, angles=row.angles, **numbers)


def _add_scaled(scaling: str, rope: dict[str, Any], numbers: dict[str, Any], longest: int, original: int) -> None:
    """Add the numbers that follow from the length trained before the scaling; take those of yarn out of `rope`."""
    numbers["original_len"] = original
    if scaling in ("yarn", "longrope"):
        numbers.setdefault("factor", longest / original)
    if scaling == "yarn":
        weights = [_number(key, rope.pop(key, 0)) for key in ("mscale", "mscale_all_dim")]
        if all(weights):
            above, below = (yarn_scale(numbers["factor"], weight) for weight in weights)
            numbers.setdefault("attention_factor", above / below)


def _rope_type(row: Rotary, rope: dict[str, Any]) -> str:
    """Take the type out of `rope`; the older key counts where the other is missing."""
    old = rope.pop("type", None)
    stated = rope.pop("rope_type", "default" if old is None else old)
    scaling: str = row.aliases.get(stated, stated) if isinstance(stated, str) else stated
    if scaling not in (row.types or ("default",)):
        raise ValueError(f"rope_type: got {stated!r}, expected {', '.join(row.types)}")
    return scaling


def _original_length(row: Rotary, name: str, rope: dict[str, Any], config: Config, longest: int) -> int:
    """Remove the length trained before the scaling from `rope`, and return it.

    A value beside `rope_parameters` takes precedence, unless these are per layer.
    """
    inside = rope.pop("original_max_position_embeddings", longest)
    outside = config("original_max_position_embeddings", row.original_len or inside)
    stated = inside if name else outside
    if type(stated) is not int or stated < 1:
        raise ValueError(f"original_max_position_embeddings: got {stated!r}, expected 1 or more")
    return stated


def _share(row: Rotary, rope: dict[str, Any], config: Config, scaling: str) -> Any:
    key, default = row.share or ("partial_rotary_factor", 1.0)
    outside = default(config) if callable(default) else default
    if key is not None:
        stated = config.nullable(key, outside)
        outside = 1.0 if stated is None else stated
    share = rope.pop("partial_rotary_factor", outside)
    if not row.share and scaling == "default":  # the library does not read it
        return 1.0
    share = _number("partial_rotary_factor", share)
    if not row.share and scaling != "proportional" and share != 1:
        # The library computes too few columns, and its attention fails.
        raise ValueError(f"partial_rotary_factor: got {share}, expected 1 with rope_type {scaling!r} for this type")
    return share


def _rotary_width(row: Rotary, name: str, config: Config, width: int, share: float) -> int:
    """Return the width of the rotary outputs: a `share` of the columns of a head, unless the file states it."""
    dim = _width(row.dim[0], config(*row.dim)) if row.dim else int(_head_dim(row, name, config, width) * share)
    if row.repeated and (stated := config(row.repeated, dim)) != dim:
        raise ValueError(f"{row.repeated}: got {stated!r}, expected {dim}, the rotary width")
    return dim


def _turning_pairs(share: float, dim: int) -> int:
    """Return the number of pairs that turn, of all pairs of a head."""
    turning = int(share * dim // 2)
    if not 1 <= turning <= dim // 2:
        raise ValueError(f"partial_rotary_factor: got {share}, expected a share of 1 to {dim // 2} pairs of a head")
    return turning


def _head_dim(row: Rotary, name: str, config: Config, width: int) -> Any:
    if row.widths:
        return _width("head_dim", row.widths(config)[name])
    stated = config.nullable("head_dim", row.head_dim)
    if stated is not None:
        return _width("head_dim", stated)
    heads = config("num_attention_heads", row.heads)
    if type(heads) is not int or not 1 <= heads <= width:
        raise ValueError(f"num_attention_heads: got {heads!r}, expected 1 to {width}")
    return width // heads


def _width(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_WIDTH:
        raise ValueError(f"{key}: got {value!r}, expected 1 to {MAX_WIDTH}")
    return value


def _number(key: str, value: Any) -> Any:
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list):
            raise ValueError(f"{key}: got {value!r}, expected a list of numbers")
        return tuple(_number(f"{key}[{i}]", number) for i, number in enumerate(value))
    if not isinstance(value, int | float) or isinstance(value, bool) != (key == "truncate"):
        raise ValueError(f"{key}: got {value!r}, expected {'true or false' if key == 'truncate' else 'a number'}")
    return value


def as_stored(output: RotaryOutput, tensor: NDArray[np.float32]) -> RotaryOutput | None:
    """Return `output` as `tensor` of the file has it: float32 frequencies (R/2,), or a table (M, R).

    None if a table differs from `output`: some files hold a table rounded to a narrow type.

    Raises:
        ValueError: there are not R/2 frequencies.

    """
    config = output.config
    frequencies = rotary_frequencies(config)
    if tensor.ndim == 1:
        if np.array_equal(tensor, frequencies):
            return output
        return replace(output, config=RotaryConfig(dim=config.dim, scaling="given", frequencies=tuple(tensor.tolist())))
    if tensor.ndim != 2 or tensor.shape[1] != config.dim:
        return None
    angles = np.arange(len(tensor)).astype(frequencies.dtype)[:, None] * frequencies
    table = np.concatenate((np.sin(angles, dtype=np.float64), np.cos(angles, dtype=np.float64)), axis=1)
    table *= attention_factor(config)
    return output if (np.abs(table - tensor) <= ROUNDING).all() else None
