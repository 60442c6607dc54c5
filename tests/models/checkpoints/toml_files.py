"""Checkpoints with a front-end described in TOML."""

from pathlib import Path

import torch
from safetensors.torch import save_file

TABLES = {
    "embed": torch.randn(11, 4, generator=torch.Generator().manual_seed(1)),
    "places": torch.randn(9, 4, generator=torch.Generator().manual_seed(2)),
    "kinds": torch.randn(2, 4, generator=torch.Generator().manual_seed(3)),
    "gain": torch.randn(4, generator=torch.Generator().manual_seed(4)),
    "shift": torch.randn(4, generator=torch.Generator().manual_seed(5)),
    "widen": torch.randn(6, 4, generator=torch.Generator().manual_seed(6)),
    "corner": torch.randn(3, 4, generator=torch.Generator().manual_seed(7)),
    "unused": torch.zeros(1),
}
TOKENS = '[[steps]]\nkind = "tokens"\nweight = "embed"\n'
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def describe(folder: Path, text: str) -> Path:
    (folder / "frontend.toml").write_text(text)
    save_file(TABLES, folder / "model.safetensors")
    return folder
