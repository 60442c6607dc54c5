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
from preblock.models.config import FrontEndConfig

FAMILIES: dict[str, Family] = ENCODERS | DECODERS | ENCODER_DECODERS

SIZES: tuple[tuple[tuple[str, ...], Callable[[FrontEndConfig], set[int]]], ...] = (
    (("vocab_size", "n_words"), lambda frontend: {frontend.tokens.rows}),
    (("embedding_size", "input_embedding_size", "word_embed_proj_dim"), lambda frontend: {frontend.tokens.width}),
    (("hidden_size", "n_embd", "d_model", "dim", "emb_dim"), lambda frontend: {frontend.widths[-1]}),
    (("type_vocab_size",), lambda frontend: _indices(frontend, "token_type_ids")),
    (("n_langs",), lambda frontend: _indices(frontend, "langs")),
    (("max_position_embeddings", "n_positions", "max_target_positions"), lambda frontend: _rows(frontend)),
)
"""Keys that state a size -> the values that agree with the tensors; none where the tensors do not tell."""


def _indices(frontend: FrontEndConfig, name: str) -> set[int]:
    return {frontend.indices[name]} if name in frontend.indices else set()


def _rows(frontend: FrontEndConfig) -> set[int]:
    """Some families count the rows before the first position in, some do not."""
    positions = frontend.positions
    return {positions.rows, positions.rows - positions.first} if positions and positions.table == "learned" else set()


def sides_of(model_type: str) -> list[str]:
    """Return the sides of a model that are known, such as encoder and decoder, or nothing for a model without."""
    return [name.partition("/")[2] for name in (*STEMS, *FAMILIES) if name.startswith(f"{model_type}/")]


def known() -> list[str]:
    """Return every model type that is known."""
    return sorted({name.partition("/")[0] for name in (*FAMILIES, *STEMS)})
