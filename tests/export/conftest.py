"""A tiny checkpoint written by transformers, and a large one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel

from tests.support.exports import translations  # noqa: F401
from tests.support.shared import Shared
from tests.support.tokenizers import write_tokenizer


@pytest.fixture(scope="session")
def tiny_checkpoint(shared: Shared) -> Path:
    """The folder of a random BERT: V 40, D 8, M 20, S 2."""
    return shared.make("tiny checkpoint", lambda root: save_tiny(root / "tiny")) / "tiny"


def save_tiny(folder: Path) -> None:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=40,
        hidden_size=8,
        max_position_embeddings=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    BertModel(config).save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_bytes(text.replace("\n", "\r\n").encode())  # no artifact rewrites it


@pytest.fixture(scope="session")
def large_checkpoint(shared: Shared) -> Path:
    """The folder of a GPT-2 with a table of 80 MB, and 20 MB as int8: several chunks to write and to round."""
    return shared.make("large checkpoint", save_large)


def save_large(folder: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 2**15, "n_embd": 610, "n_positions": 8}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"wte.weight": torch.ones(2**15, 610), "wpe.weight": torch.ones(8, 610)}, folder / "model.safetensors")
