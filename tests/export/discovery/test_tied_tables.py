"""Discovery of tables that the library fills in from others, against the models of transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from preblock.export.discovery.discovery import discover
from preblock.export.discovery.errors import DiscoveryError
from tests.families.tiny_models import head_class, save_whole

TABLES = ("shared.weight", "embed_tokens.weight", "lm_head.weight")


def save_with_table(model_type: str, table: str, folder: Path, **values: object) -> dict[str, object]:
    """Save a tiny model with the token table under the name `table` alone, and return its changed `config.json`."""
    with torch.enable_grad():
        save_whole(model_type, folder)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if name.endswith(TABLES)]
    tensors[table] = tensors.pop(names[0])
    kept = {name: tensor for name, tensor in tensors.items() if name == table or name not in names}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    document: dict[str, object] = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(document))
    return document


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("model_type", "table"),
    [
        ("mt5", "lm_head.weight"),
        ("plbart", "model.decoder.embed_tokens.weight"),
        ("plbart", "model.encoder.embed_tokens.weight"),
    ],
)
def test_table_under_any_tied_name_is_discovered(model_type: str, table: str, side: str, tmp_path: Path) -> None:
    document = save_with_table(model_type, table, tmp_path)
    model = head_class(model_type).from_pretrained(tmp_path)
    part = model.get_encoder() if side == "encoder" else model.get_decoder()
    expected = part.embed_tokens.weight
    assert torch.equal(discover(tmp_path, document, side).frontend.tokens.weight, expected)


def test_discovery_of_untied_head_alone_is_rejected(tmp_path: Path) -> None:
    document = save_with_table("helium", "lm_head.weight", tmp_path, tie_word_embeddings=False)
    with pytest.raises(DiscoveryError, match="the checkpoint lacks "):
        discover(tmp_path, document)
