"""Tiny models with rotary attention, and their rotary outputs."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from preblock.models.frontend import FrontEnd
from tests.families.published_models import _ENCODER


def tiny(folder: Path, model: str, **values: Any) -> Any:
    """Save a tiny model, and return it as transformers loads it."""
    kind = getattr(transformers, model)
    torch.manual_seed(0)
    sizes = {**_ENCODER, "max_position_embeddings": 64, **values}
    kind(kind.config_class(**sizes)).save_pretrained(folder)
    return kind.from_pretrained(folder).eval()


def outputs_of(frontend: FrontEnd, length: int = 9, offset: int = 0) -> dict[str, Tensor]:
    return frontend.rotary_outputs(torch.zeros((2, length), dtype=torch.int64), offset)
