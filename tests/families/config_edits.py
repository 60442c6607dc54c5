"""Edits of a family's `config.json`, and their effect in transformers and in Preblock."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from preblock.export.parity import ROTARY_ULP, difference
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.frontend import FrontEnd
from tests.families.library_models import NO_LOOKUP, TransformersModel, config_class, model_class, save
from tests.families.published_models import GEMMA4, PUBLISHED, VISION_LANGUAGE, VOCABULARY

REMOVED = "(removed)"
"""The value of an edit that removes its key."""
MAX_ULP = 8.0
"""Tolerance of a front-end with a norm or a projection; all others must agree bit for bit."""
LENGTH, MAX_LENGTH = 11, 80
SKIPPED = ("model_type", "architectures", "transformers_version", "dtype", "id2label", "label2id")
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 32}
VALUES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", "rotary", "relative_key", "relative_key_query"),
    "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 2),
    "rope_scaling": (_LINEAR, _DYNAMIC, _YARN, _LLAMA3, {"type": "linear", "factor": 2.0}),
    "rope_parameters": tuple(rope | {"rope_theta": 5e3} for rope in (_LINEAR, _DYNAMIC, _YARN, _LLAMA3)),
    "attn_type": ("bi", "uni"),
    "hidden_act": ("relu",),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "local_rope_theta"), (5e3, 5000)),
    "global_rope_theta": (5e3,),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (0.5, 1.0)),
    **dict.fromkeys(("sliding_window_pattern", "global_attn_every_n_layers"), (1, 2, 3)),
    "head_dim": (4, 16),
    "embedding_size": (16, 32),
    "original_max_position_embeddings": (32,),
}
"""Further values of a key; those of older files are tried in every family."""

LARGE = {f"{name}/text" for name in ("gemma3n", "qwen4_exp", *GEMMA4, *VISION_LANGUAGE)}
"""Models of several parts; the default sizes of an emptied part would fill the memory."""


@dataclass(frozen=True)
class Edit:
    """One changed key; a path of several keys leads into objects."""

    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        value = self.value if self.value == REMOVED else json.dumps(self.value)
        return f"{'.'.join(self.path)}: {value}"

    def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with the change."""
        key, *rest = self.path
        if rest:
            return {**config, key: Edit(tuple(rest), self.value).apply(config[key])}
        changed = {**config, key: self.value}
        return {name: value for name, value in changed.items() if value != REMOVED}


@dataclass(frozen=True)
class Outcome:
    """The result of an edit.

    `kind` is "equal", "different", "crashed" (an error other than CheckpointError), "refused" by both, "preblock
    refuses" or "transformers refuses", alone.
    """

    kind: str
    detail: str = ""


def save_whole(name: str, folder: Path) -> dict[str, Any]:
    """Save a tiny model of a family, and return its configuration with every key except `layer_types`.

    Without it, the number of layers and the patterns of older files have an effect.
    """
    save(name, folder)
    config = config_class(name).from_pretrained(folder)
    whole: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    whole.pop("layer_types", None)
    return whole


def edits_of(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Edit]:
    """Yield every edit of `config`: each key removed, null, and with other values."""
    for key in dict.fromkeys((*config, *(VALUES if not path else ()))):
        if key in SKIPPED:
            continue
        place, value = (*path, key), config.get(key)
        others = [*_others(value), *VALUES.get(key, ()), None, *([REMOVED] if key in config else [])]
        written = [json.dumps(other) for other in others]
        for index, other in enumerate(others):
            if written[index] not in (*written[:index], json.dumps(value)):
                yield Edit(place, other)
        if isinstance(value, dict) and value:
            yield from edits_of(value, place)


def _others(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1, 0, 1, 2, -1]
        case float():
            return [2 * value, value / 2, 0.0, 1.0]
        case str():
            return ["other"]
        case list():
            return [[], value[:1], value[::-1]]
        case dict():
            return [{}]
        case _:
            return [1, True]


def try_edit(name: str, source: Path, config: Mapping[str, Any], edit: Edit, folder: Path) -> Outcome:
    """Write the edited config and the weights of `source` into `folder`, and compare the two libraries."""
    folder.mkdir()
    os.link(source / "model.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(edit.apply(config)))
    frontend: FrontEnd | None = None
    reason = ""
    try:
        frontend = FrontEnd.from_data(read_frontend(folder, name.partition("/")[2] or None, rotary_length=None)).eval()
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{folder}: ")
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {error}")
    try:
        model = _load(name, folder)
        ids = _every_id(LENGTH if frontend is None else _length(frontend), ())
        model.first_block_input(ids, np.ones_like(ids))
    except Exception as error:  # the library has no exception of its own
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome("transformers refuses", why) if frontend else Outcome("refused", reason)
    if frontend is None:
        return Outcome("preblock refuses", reason)
    try:
        worst = next(_differences(model, frontend), None)
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {error}")
    return Outcome("different", worst) if worst else Outcome("equal")


def _load(name: str, folder: Path) -> TransformersModel:
    kind, config = model_class(name), config_class(name).from_pretrained(folder)
    if name in LARGE:
        _refuse_other_shapes(kind, config, folder)
    return TransformersModel(name, kind.from_pretrained(folder, config=config, dtype=torch.float32).eval())


def _refuse_other_shapes(kind: Any, config: Any, folder: Path) -> None:
    """Raise ValueError for tensors of other shapes than the model's, as the library does after it fills the memory."""
    with torch.device("meta"):
        wanted = {key: tensor.shape for key, tensor in kind(deepcopy(config)).state_dict().items()}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if key in wanted and wanted[key] != tensor.shape:
            raise ValueError(f"{key}: got the shape {[*tensor.shape]}, expected {[*wanted[key]]}")


def _length(frontend: FrontEnd) -> int:
    return min(LENGTH, frontend.config.max_len or LENGTH)


def _every_id(length: int, refused: Sequence[int]) -> NDArray[np.int64]:
    """Return rows with every id of the vocabulary except the refused ones."""
    return np.resize(np.setdiff1d(np.arange(VOCABULARY), refused), (-(-VOCABULARY // length), length))


def _differences(model: TransformersModel, frontend: FrontEnd) -> Iterator[str]:
    """Yield a line for each case with a difference above the tolerance."""
    config = frontend.config
    allowed = 0.0 if config.exact else MAX_ULP
    for case, ids, mask in _cases(model, frontend):
        given = {"attention_mask": torch.from_numpy(mask)} if config.needs_mask else {}
        types = {name: np.random.default_rng(1).integers(0, count, ids.shape) for name, count in config.indices.items()}
        tensors = {name: torch.from_numpy(index) for name, index in types.items()}
        with torch.inference_mode():
            found = frontend(torch.from_numpy(ids), indices=tensors, **given).numpy()
        max_abs, max_ulp = difference(found, model.first_block_input(ids, mask, **types))
        if max_ulp > allowed:
            yield f"{case}: off by {max_abs:.2g}"
    if model.name not in NO_LOOKUP:
        ids = np.array([[3, 4, 5, 6]])[:, : _length(frontend)]
        with torch.inference_mode():
            looked_up = frontend.look_up(torch.from_numpy(ids)).numpy()
        expected = model.first_block_input(ids)
        max_abs, max_ulp = difference(model.first_block_input(None, inputs_embeds=looked_up), expected)
        if max_ulp > allowed:
            yield f"inputs_embeds: off by {max_abs:.2g}"
    yield from _rotary_differences(model, frontend)


def _cases(model: TransformersModel, frontend: FrontEnd) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the name, the ids and the mask of each case; padding has the id named by the library's config."""
    length = _length(frontend)
    ids = _every_id(length, frontend.config.refused_ids)
    yield "every id", ids, np.ones_like(ids)
    values = model.whole.config
    padding = getattr(values, "pad_token_id", None)
    if padding is None:
        padding = getattr(getattr(values, "text_config", values), "pad_token_id", None)
    padding = 0 if padding is None or not 0 <= padding < VOCABULARY else padding
    legal = np.setdiff1d(np.arange(3, VOCABULARY), [padding, *frontend.config.refused_ids])
    half = length // 2
    for case, pads in (("left padding", slice(0, half)), ("right padding", slice(length - half, None))):
        ids = np.random.default_rng(0).choice(legal, (2, length))
        mask = np.ones_like(ids)
        mask[0, pads] = 0
        ids[mask == 0] = padding
        if padding not in frontend.config.refused_ids:
            yield case, ids, mask
    longest = min(frontend.config.max_len or MAX_LENGTH, MAX_LENGTH)
    ids = np.resize(legal, (1, longest))
    yield f"length {longest}", ids, np.ones_like(ids)


def _rotary_differences(model: TransformersModel, frontend: FrontEnd) -> Iterator[str]:
    if not PUBLISHED[model.name].rotary or frontend.config.no_rotary:
        return
    if _length(frontend) == 1:  # all cosines are 1, and their form cannot be told
        return
    ids = np.full((1, _length(frontend)), 3)
    with torch.inference_mode():
        found = {name: tensor.numpy() for name, tensor in frontend.rotary_outputs(torch.from_numpy(ids)).items()}
    expected = model.rotary(ids) if frontend.config.rotary or model.name != "falcon" else {}
    if found.keys() != expected.keys():
        yield f"rotary: {', '.join(found) or 'none'} instead of {', '.join(expected) or 'none'}"
        return
    unit = float(np.spacing(np.float32(1)))
    for name, values in found.items():
        max_abs, max_ulp = difference(values, expected[name], unit)
        if max_ulp > ROTARY_ULP:
            yield f"{name}: off by {max_abs:.2g}"
