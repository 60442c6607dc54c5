"""Tiny random models that add a pairwise bias in attention, made and saved by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

HEADS = 6
_SIZES: dict[str, Any] = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {"d_model": 48, "num_heads": HEADS, "d_kv": 8, "d_ff": 20, "num_layers": 2}
BIASED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomModel", {"hidden_size": 48, "n_head": HEADS, "n_layer": 2}),
    "mpt": ("MptModel", {"d_model": 48, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 64}),
    "falcon": (
        "FalconModel",
        {"hidden_size": 48, "num_attention_heads": HEADS, "num_hidden_layers": 2, "alibi": True},
    ),
    "t5/encoder": ("T5Model", _T5),
    "t5/decoder": ("T5Model", _T5),
    "xlnet": ("XLNetModel", {"d_model": 48, "n_head": HEADS, "n_layer": 2, "d_inner": 20, "mem_len": 64}),
}


def save(name: str, folder: Path, **changes: Any) -> Any:
    """Save a model of `BIASED` with random weights, and return it in evaluation mode."""
    kind, config = BIASED[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**_SIZES | config | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model.eval()
