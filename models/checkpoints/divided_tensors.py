"""Refuses a tensor whose values are divided among several tensors of a file, as quantisation and adapters leave them.

A library computes the values from all parts. One of them alone, or a tied table in place of them, has other values.
"""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from preblock.models.checkpoints.weight_files import CheckpointError, names_of_key, read_json
from preblock.models.serialization import Keys

LEAVES = ("weight", "bias", "gamma", "beta")
"""Names of tensors inside a module of their own: every other tensor of that module is a part of one of them."""
UNREAD = "_weight"
"""Name of a tensor beside the `weight` of DeBERTa-v3, left by its training; transformers does not read it."""
CONFIG, METHOD = "config.json", "quant_method"


def find_whole(folder: Path, names: Collection[str], prefix: str, keys: Keys, known: Collection[str]) -> str | None:
    """Return the name of a tensor among `names`, the first by `names_of_key`; None without one.

    Args:
        folder: the checkpoint, for messages.
        names: of all tensors in the files.
        prefix: before every name.
        keys: names of the tensor.
        known: keys of other tensors of the front-end: none is a part.

    Raises:
        CheckpointError: the files hold parts of the tensor, or of an earlier name.

    """
    others = {start + key for key in known for start in ("", prefix)}
    for name in names_of_key(prefix, keys):
        check_whole(folder, names, name, others)
        if name in names:
            return name
    return None


def check_whole(folder: Path, names: Collection[str], name: str, known: Collection[str] = ()) -> None:
    """Raise CheckpointError if `names` hold parts of the tensor `name`, apart from `known` tensors."""
    unread = {f"{_owner(name)}.{UNREAD}"} if name in names else set()
    parts = [part for part in find_parts(names, name) if part not in {*known, *unread}]
    if parts:
        raise CheckpointError(f"{folder}: {describe_parts(folder, name, parts)}")


def find_parts(names: Iterable[str], name: str) -> list[str]:
    """Return the tensors among `names` that belong to the tensor `name`, sorted."""
    owner = _owner(name)
    starts = (f"{name}.", f"{name}:", f"{name}_scale") if owner == name else (f"{owner}.",)
    whole = {name, *(f"{owner}.{leaf}" for leaf in LEAVES)}
    return sorted(other for other in names if other.startswith(starts) and other not in whole)


def describe_parts(folder: Path, name: str, parts: list[str]) -> str:
    """Return the reason not to read the tensor `name`, for people."""
    return (
        f"{_owner(name)} has further tensors in the files, {', '.join(parts[:3])}, as in a quantised model or with an "
        f"adapter; {_describe_method(folder)}; export the model as it was before, or save it again with plain tensors"
    )


def _owner(name: str) -> str:
    """Return the module of the tensor `name`; the tensor itself if it has none of its own."""
    module, _, own = name.rpartition(".")
    return module if module and own in LEAVES else name


def _describe_method(folder: Path) -> str:
    """Return the method of quantisation in `config.json`, in words."""
    values = read_json(folder / CONFIG) if os.path.lexists(folder / CONFIG) else {}
    sections = [values, *(value for value in values.values() if isinstance(value, dict))]
    settings = [section.get(key) for section in sections for key in ("quantization_config", "compression_config")]
    method = next((found.get(METHOD) for found in settings if isinstance(found, dict)), None)
    return f"{CONFIG} names no {METHOD}" if method is None else f"{METHOD} in {CONFIG} is {method!r}"
