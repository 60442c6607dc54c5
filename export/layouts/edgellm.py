"""Layout of TensorRT Edge-LLM: the table in float16, and the cosines and sines of its engine's input for positions.

Letters: V rows and D width of the table, M positions, R rotated part of a head, n any number of rows.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preblock.export.errors import ExportError
from preblock.export.layouts.token_lookup import INPUT_IDS, ROW_VALUES, TokenLookup
from preblock.models.config import MAX_TABLE_ROWS
from preblock.service.artifacts.manifest import Rotary
from preblock.service.runtime.session import Session

TABLE, CACHES = "embedding.safetensors", "rope_rotary_cos_sin.safetensors"
CACHE = "rope_rotary_cos_sin"


def write_edgellm(lookup: TokenLookup, folder: Path) -> None:
    """Write `embedding.safetensors`, and for rotary attention with a limit `rope_rotary_cos_sin.safetensors`.

    - `embedding`, float16 (V, D).
    - `rope_rotary_cos_sin`, float32 (1, M, R): cosines, then sines, each in R/2 columns. Models with several kinds of
      layers have `rope_rotary_cos_sin_full` and `rope_rotary_cos_sin_sliding`, each of its own R.

    Raises:
        ExportError: a value is too large for float16, or the artifact has rotary outputs in float16.

    """
    shape = (lookup.manifest.vocab_size, *lookup.shape)
    _write_tensors(folder / TABLE, {"embedding": ("F16", shape, _halves(lookup))})
    limits = {rotary: rotary.max_len or lookup.manifest.max_len for rotary in lookup.manifest.rotary}
    for rotary, limit in limits.items():
        if limit is not None and limit > MAX_TABLE_ROWS:
            expected = f"at most {MAX_TABLE_ROWS}: the cache has a row for each position, so export with --max-len"
            raise ExportError(f"max_len: got {limit}, expected {expected}")
        if rotary.dtype != "float32":
            expected = "float32: the cache is float32, so export the model without --rotary-dtype"
            raise ExportError(f"{CACHES}: got {rotary.cos} in {rotary.dtype}, expected {expected}")
    caches = {
        CACHE + _kind_of_layer(rotary): ("F32", (1, limit, rotary.width), _caches(lookup, rotary, limit))
        for rotary, limit in limits.items()
        if limit is not None
    }
    if caches:
        _write_tensors(folder / CACHES, caches)


def _halves(lookup: TokenLookup) -> Iterator[NDArray[Any]]:
    for rows in lookup.rows():
        with np.errstate(over="ignore"):
            halves = rows.astype("<f2")
        if not np.isfinite(halves).all():
            value = float(rows[~np.isfinite(halves)][0])
            raise ExportError(f"{TABLE}: the value {value:g} of the table is too large for float16")
        yield halves


def _kind_of_layer(rotary: Rotary) -> str:
    """Return the ending of a cache in the engine, such as `_sliding`."""
    ending = rotary.cos.removeprefix("rotary_cos_sin" if rotary.form == "fused" else "rotary_cos")
    return ending.removesuffix("_attention")


def _caches(lookup: TokenLookup, rotary: Rotary, limit: int) -> Iterator[NDArray[Any]]:
    """Yield cosines and sines of all positions in order, float32 (n, R)."""
    session = Session(lookup.folder)
    step, half = max(1, ROW_VALUES // rotary.width), rotary.width // 2
    for begin in range(0, limit, step):
        ids = np.zeros((1, min(step, limit - begin)), np.int64)
        feeds = {tensor.name: np.zeros_like(ids) for tensor in session.inputs}
        if "attention_mask" in feeds:
            feeds["attention_mask"] = np.ones_like(ids)
        feeds |= {INPUT_IDS: ids, "offset": np.array([begin])}
        found = session.run(feeds, list(dict.fromkeys((rotary.cos, rotary.sin))))
        # In each form, cosines come first in the one output, and sines last in the other.
        cache = np.concatenate([found[rotary.cos][0, :, :half], found[rotary.sin][0, :, -half:]], axis=1)
        yield cache.astype("<f4", copy=False)


def _write_tensors(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], Iterator[NDArray[Any]]]]) -> None:
    """Write a safetensors file of tensors (dtype, shape, C-contiguous arrays in order)."""
    header, begin = {}, 0
    for name, (dtype, shape, _) in tensors.items():
        end = begin + int(np.prod(shape)) * {"F16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, _, arrays in tensors.values():
            for array in arrays:
                stream.write(np.ascontiguousarray(array).data)
