"""A checkpoint, its artifacts in every quantization, and their tables."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from preblock.export.exporter import export
from tests.export.quantization.rounding import WAYS, Array, D, M, V
from tests.support.shared import Shared


@pytest.fixture(scope="module")
def quantized_source(shared: Shared) -> Path:
    """The folder of a random GPT-2 in float32."""

    def save(root: Path) -> None:
        torch.manual_seed(4)
        config = transformers.GPT2Config(vocab_size=V, n_embd=D, n_positions=M, n_layer=1, n_head=2)
        transformers.GPT2Model(config).save_pretrained(root / "gpt2")

    return shared.make("quantized checkpoint", save) / "gpt2"


@pytest.fixture(scope="module")
def quantized_repository(quantized_source: Path, shared: Shared) -> Path:
    """The same GPT-2, stored in every format."""

    def fill(root: Path) -> None:
        for way, options in WAYS.items():
            export(str(quantized_source), way, root, **options)

    return shared.make("quantized", fill)


@pytest.fixture(scope="module")
def quantized_tables(quantized_source: Path) -> tuple[Array, Array]:
    """Its tables of tokens and positions, as transformers has them."""
    model = transformers.GPT2Model.from_pretrained(quantized_source)
    return model.wte.weight.detach().numpy(), model.wpe.weight.detach().numpy()


@pytest.fixture
def quantized_copy(quantized_repository: Path, tmp_path: Path) -> Path:
    """The repository, to break."""
    return shutil.copytree(quantized_repository, tmp_path / "copy")
