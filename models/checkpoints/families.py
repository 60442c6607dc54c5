"""The family table: how published models name and compose their front-end.

A family is a row, named by `model_type` in its `config.json`, and by its side where it has two. Its steps name the
tensors of a checkpoint as a base model's file has them. Read from transformers 5.24, and checked against it.
"""

from preblock.models.checkpoints.decoder_families import DECODERS
from preblock.models.checkpoints.encoder_decoder_families import ENCODER_DECODERS
from preblock.models.checkpoints.encoder_families import ENCODERS
from preblock.models.checkpoints.family import Family
from preblock.models.checkpoints.token_families import TOKEN_DECODERS

FAMILIES: dict[str, Family] = ENCODERS | DECODERS | TOKEN_DECODERS | ENCODER_DECODERS
