"""Reads soft prompts: the folder saved by PEFT after prompt tuning.

Source: peft 0.21.2, `PromptTuningConfig` and `save_pretrained`.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from preblock.models.checkpoints.weight_files import CheckpointError, WeightFile, read_json

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
KEY = "prompt_embeddings"
METHOD = "PROMPT_TUNING"


def read_soft_prompt(folder: Path, width: int) -> NDArray[np.float32]:
    """Return the vectors of the soft prompt in `folder`, float32 (N, width), for a model with token vectors of `width`.

    Raises:
        CheckpointError: a file is missing or unreadable, the folder holds another method than prompt tuning, or the
            vectors have another number or width.

    """
    config = read_json(folder / CONFIG)
    method, modules = config.get("peft_type"), config.get("num_transformer_submodules", 1)
    if method != METHOD:
        raise CheckpointError(f"{folder / CONFIG}: peft_type is {method!r}, expected {METHOD}")
    if modules not in (1, None):
        message = f"num_transformer_submodules is {modules!r}, expected 1, a prompt for one model"
        raise CheckpointError(f"{folder / CONFIG}: {message}")
    file = folder / WEIGHTS
    if not file.exists() and (folder / PICKLE).exists():
        message = f"only {PICKLE}, a pickle, which can run any code when it is read; save it again as safetensors"
        raise CheckpointError(f"{folder}: {message}")
    vectors = WeightFile(file).get(KEY).astype(np.float32)
    count = config.get("num_virtual_tokens")
    if vectors.ndim != 2 or vectors.shape[0] != count or vectors.shape[1] != width or not len(vectors):
        raise CheckpointError(f"{file}: {KEY} has shape {list(vectors.shape)}, expected [{count}, {width}]")
    if not np.isfinite(vectors).all():
        raise CheckpointError(f"{file}: {KEY} holds infinite values or NaN")
    return vectors
