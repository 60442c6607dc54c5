"""A tiny checkpoint that transformers wrote."""

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random BERT: V 40, D 8, M 20, S 2."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
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
    (folder / "tokenizer.json").write_bytes(b'{ "any":\r\n "bytes" }')
    return folder
