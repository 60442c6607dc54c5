"""The table of soft prompts of an artifact."""

from pathlib import Path

import numpy as np

from preblock.service.artifacts.manifest import Manifest
from preblock.service.artifacts.names import MANIFEST, SOFT_PROMPTS
from preblock.service.core.errors import ArtifactError
from preblock.service.runtime.runner import Float32


def map_soft_prompts(folder: Path, manifest: Manifest) -> dict[str, Float32]:
    """Map the vectors of each soft prompt, float32 (N, width of a token vector).

    Raises:
        ArtifactError: the file does not hold them.

    """
    prompts = manifest.soft_prompts
    if not prompts:
        return {}
    if manifest.token_embeddings is None or SOFT_PROMPTS not in manifest.files:
        raise ArtifactError(f"{MANIFEST} soft_prompts", ", ".join(prompts), f"token_embeddings and {SOFT_PROMPTS}")
    width, size = manifest.token_embeddings.width, manifest.files[SOFT_PROMPTS].bytes
    rows = sum(prompt.rows for prompt in prompts.values())
    ends = [prompt.first + prompt.rows for prompt in prompts.values()]
    if size != 4 * width * rows or max(ends) > rows:
        got = f"{rows} rows up to row {max(ends)}"
        raise ArtifactError(f"{MANIFEST} soft_prompts", got, f"the rows of {SOFT_PROMPTS}, {size} bytes")
    table = np.memmap(folder / SOFT_PROMPTS, np.float32, "r", 0, (rows, width)).view(np.ndarray)
    return {name: table[prompt.first : prompt.first + prompt.rows] for name, prompt in prompts.items()}
