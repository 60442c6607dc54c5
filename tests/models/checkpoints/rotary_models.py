"""Tiny models with rotary attention, their rotary outputs, and the modules of the library."""

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from preblock.models.families import FAMILIES
from preblock.models.families.rotary import Rotary
from preblock.models.frontend import FrontEnd
from tests.families.published_models import _ENCODER

ROTARY = {name: row.rotary for name, row in FAMILIES.items() if row.rotary}
TEXT_PARTS = {"glm46v/text": "glm4v_text", "glmga/text": "glm4v_text"}
"""Families with the text part of another type."""


def rotary_of(family: str, values: dict[str, Any]) -> Rotary | None:
    row = FAMILIES[family]
    return row.parts.get(str(values.get("model_type")), row).rotary_of(values)


def tiny(folder: Path, model: str, **values: Any) -> Any:
    """Save a tiny model, and return it as transformers loads it."""
    kind = getattr(transformers, model)
    torch.manual_seed(0)
    sizes = {**_ENCODER, "max_position_embeddings": 64, **values}
    kind(kind.config_class(**sizes)).save_pretrained(folder)
    return kind.from_pretrained(folder).eval()


def outputs_of(frontend: FrontEnd, length: int = 9, offset: int = 0) -> dict[str, Tensor]:
    return frontend.rotary_outputs(torch.zeros((2, length), dtype=torch.int64), offset)


def config_of(family: str, values: dict[str, Any]) -> Any:
    # A copy, because transformers writes into the dictionaries it is given.
    stated = copy.deepcopy(values)
    part = stated.pop("model_type", TEXT_PARTS.get(family, family.replace("/", "_")))
    return CONFIG_MAPPING[part](**stated)


def modeling_of(config: Any) -> Any:
    """Return the module with the library's class of a model; some types share one."""
    kind = config.model_type
    name = str(MODEL_MAPPING_NAMES.get(kind) or MODEL_MAPPING_NAMES[kind.removesuffix("_text")])
    return importlib.import_module(getattr(transformers, name).__module__)
