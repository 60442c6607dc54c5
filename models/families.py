"""The family table: how published models name and compose their front-end. Every Hugging Face name is here.

A family is a row. `read_config` in `checkpoint.py` reads `config.json` by it, `read_tensors` the tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row.

    Args:
        model_type: `model_type` of its `config.json`.
        fields: field of `FrontEndConfig` -> key of `config.json`, and the value where the key is absent
            (a default of the library; `...` where there is none, so that the key is required).
        tensors: name in `FrontEnd.state_dict()` -> accepted keys in the checkpoint, the current spelling first.
        prefixes: what may stand before all these keys: nothing in a base model's file, a prefix in a head model's.
        required: keys of `config.json` that change the front-end -> the only value that this row means.
        positions: kind of position table.

    """

    model_type: str
    fields: Mapping[str, tuple[str, object]]
    tensors: Mapping[str, tuple[str, ...]]
    prefixes: tuple[str, ...]
    required: Mapping[str, object] = field(default_factory=dict)
    positions: Literal["learned"] = "learned"


BERT = Family(
    model_type="bert",
    fields={
        "vocab_size": ("vocab_size", ...),
        "d_model": ("hidden_size", ...),
        "max_len": ("max_position_embeddings", ...),
        "segments": ("type_vocab_size", 2),
        "norm_eps": ("layer_norm_eps", 1e-12),
        "padding_idx": ("pad_token_id", 0),
        "dropout": ("hidden_dropout_prob", 0.1),
    },
    tensors={
        "tokens.weight": ("embeddings.word_embeddings.weight",),
        "segments.weight": ("embeddings.token_type_embeddings.weight",),
        "positions.weight": ("embeddings.position_embeddings.weight",),
        "norm.weight": ("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"),
        "norm.bias": ("embeddings.LayerNorm.bias", "embeddings.LayerNorm.beta"),
    },
    prefixes=("", "bert."),
    required={"position_embedding_type": "absolute"},
)

GPT2 = Family(
    model_type="gpt2",
    fields={
        "vocab_size": ("vocab_size", ...),
        "d_model": ("n_embd", ...),
        "max_len": ("n_positions", ...),
        "dropout": ("embd_pdrop", 0.1),
    },
    tensors={"tokens.weight": ("wte.weight",), "positions.weight": ("wpe.weight",)},
    prefixes=("", "transformer."),
)

FAMILIES = {family.model_type: family for family in (BERT, GPT2)}
