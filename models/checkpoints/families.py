"""The family table: how published models name and compose their front-end.

A family is a row, named by `model_type` in its `config.json`, and by its side where it has two. Its steps name the
tensors of a checkpoint as a base model's file has them. Read from transformers 5.23, and checked against it.
"""

from collections.abc import Callable

from preblock.models.checkpoints.decoder_families import DECODERS
from preblock.models.checkpoints.encoder_decoder_families import ENCODER_DECODERS
from preblock.models.checkpoints.encoder_families import ENCODERS
from preblock.models.checkpoints.family import Family
from preblock.models.checkpoints.stem_families import STEMS
from preblock.models.checkpoints.token_families import TOKEN_DECODERS
from preblock.models.config import FrontEndConfig

FAMILIES: dict[str, Family] = ENCODERS | DECODERS | TOKEN_DECODERS | ENCODER_DECODERS

SIZES: tuple[tuple[tuple[str, ...], Callable[[FrontEndConfig], set[int]]], ...] = (
    (("vocab_size", "n_words"), lambda frontend: {frontend.tokens.rows}),
    (("embedding_size", "input_embedding_size", "word_embed_proj_dim"), lambda frontend: {frontend.tokens.width}),
    (("hidden_size", "n_embd", "d_model", "dim", "emb_dim"), lambda frontend: {frontend.widths[-1]}),
    (("type_vocab_size",), lambda frontend: _indices(frontend, "token_type_ids")),
    (("n_langs",), lambda frontend: _indices(frontend, "langs")),
    (("max_position_embeddings", "n_positions", "max_target_positions"), lambda frontend: _rows(frontend)),
)
"""Keys of a size in config.json -> the values consistent with the tensors; empty if the tensors do not determine it."""


def _indices(frontend: FrontEndConfig, name: str) -> set[int]:
    return {frontend.indices[name]} if name in frontend.indices else set()


def _rows(frontend: FrontEndConfig) -> set[int]:
    """Return both row counts: some families include the rows before the first position, some do not."""
    positions = frontend.positions
    return {positions.rows, positions.rows - positions.first} if positions and positions.table == "learned" else set()


def sides_of(model_type: str) -> list[str]:
    """Return the known sides of a model type, such as encoder and decoder; empty for a model with one side."""
    return [name.partition("/")[2] for name in (*STEMS, *FAMILIES) if name.startswith(f"{model_type}/")]


def known() -> list[str]:
    """Return all known model types."""
    return sorted({name.partition("/")[0] for name in (*FAMILIES, *STEMS)})
