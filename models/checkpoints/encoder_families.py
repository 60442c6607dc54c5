"""Rows of the family table: encoders, with the Hugging Face names of their tensors."""

import math
from dataclasses import replace

from preblock.models.checkpoints.family import ALL, Config, Family
from preblock.models.checkpoints.family_steps import (
    chosen_segment_steps,
    learned_position_step,
    norm_step,
    project_step,
    scale_steps,
    segment_step,
    token_step,
    unpadded_position_step,
    weight_keys,
)
from preblock.models.steps import Mask, Scale, Segments, Step

WORDS, TYPES, PLACES, LAYER_NORM = (
    f"embeddings.{name}" for name in ("word_embeddings", "token_type_embeddings", "position_embeddings", "LayerNorm")
)
ABSOLUTE = {"position_embedding_type": ("absolute",)}


def _bert(c: Config) -> list[Step]:
    return [
        token_step(WORDS),
        segment_step(TYPES),
        learned_position_step(PLACES),
        norm_step(LAYER_NORM, c("layer_norm_eps", 1e-12)),
    ]


def _roberta(c: Config) -> list[Step]:
    positions = unpadded_position_step(PLACES, c("pad_token_id", 1))
    return [token_step(WORDS), segment_step(TYPES), positions, norm_step(LAYER_NORM, c("layer_norm_eps", 1e-12))]


def _electra(c: Config) -> list[Step]:
    projected = c("embedding_size", 128) != c("hidden_size", 256)
    return [*_bert(c), *([project_step("embeddings_project")] if projected else [])]


def _big_bird(c: Config) -> list[Step]:
    tokens, *others = _bert(c)
    return [tokens, *scale_steps(c("rescale_embeddings", False), math.sqrt(c("hidden_size"))), *others]


def _deberta(c: Config) -> list[Step]:
    steps: list[Step] = [token_step(WORDS)]
    if c("position_biased_input", True):
        steps.append(learned_position_step(PLACES))
    if c("type_vocab_size", 0):
        steps.append(segment_step(TYPES))
    if c("embedding_size", c("hidden_size")) != c("hidden_size"):
        steps.append(project_step("embeddings.embed_proj", bias=False))
    return [*steps, norm_step(LAYER_NORM, c("layer_norm_eps", 1e-7)), Mask()]


def _esm(c: Config) -> list[Step]:
    steps: list[Step] = [token_step(WORDS)]
    if c("token_dropout", False):
        padding, masking = c("pad_token_id"), c("mask_token_id")
        if padding == masking:
            raise ValueError(
                f"mask_token_id is {masking}, the id of padding too: with token_dropout, the padding of a row scales "
                "its other tokens"
            )
        # 1 - 0.15 * 0.8: the share of tokens left in place in training; in float64, as the library multiplies.
        steps.append(Scale(by=1 - 0.15 * 0.8))
    if c.nullable("position_embedding_type", "absolute") == "absolute":
        steps.append(unpadded_position_step(PLACES, c("pad_token_id")))
    if c("emb_layer_norm_before", False):
        steps.append(norm_step("embeddings.layer_norm", c("layer_norm_eps", 1e-12)))
    return [*steps, Mask()]


def _roformer(c: Config) -> list[Step]:
    projected = c("embedding_size", c("hidden_size")) != c("hidden_size")
    norm = norm_step(LAYER_NORM, c("layer_norm_eps", 1e-12))
    return [token_step(WORDS), segment_step(TYPES), norm, *([project_step("embeddings_project")] if projected else [])]


XLM_ROBERTA = Family(steps=_roberta, prefix="roberta.", padding=1, only=ABSOLUTE)
CLIP_TEXT = Family(
    steps=lambda _: [token_step("embeddings.token_embedding"), learned_position_step("embeddings.position_embedding")],
    prefix="text_model.",
)

ENCODERS: dict[str, Family] = {
    "bert": Family(steps=_bert, prefix="bert.", padding=0, only=ABSOLUTE),
    "roberta": XLM_ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "camembert": XLM_ROBERTA,
    "xlm-roberta-xl": Family(
        steps=lambda c: [token_step(WORDS), segment_step(TYPES), unpadded_position_step(PLACES, c("pad_token_id", 1))],
        prefix="roberta.",
        padding=1,
        only=ABSOLUTE,
    ),
    # Its padding id is 1; the library ignores the config.
    "mpnet": Family(
        steps=lambda c: [
            token_step(WORDS),
            unpadded_position_step(PLACES, 1),
            norm_step(LAYER_NORM, c("layer_norm_eps", 1e-12)),
        ],
        prefix="mpnet.",
        padding=1,
        only={"pad_token_id": (1,)},
    ),
    "distilbert": Family(
        steps=lambda _: [token_step(WORDS), learned_position_step(PLACES), norm_step(LAYER_NORM, 1e-12)],
        prefix="distilbert.",
    ),
    "electra": Family(steps=_electra, prefix="electra.", only=ABSOLUTE),
    "albert": Family(
        steps=lambda c: [*_bert(c), project_step("encoder.embedding_hidden_mapping_in")],
        prefix="albert.",
        only=ABSOLUTE,
    ),
    "rembert": Family(
        steps=lambda c: [*_bert(c), project_step("encoder.embedding_hidden_mapping_in")], prefix="rembert."
    ),
    "big_bird": Family(steps=_big_bird, prefix="bert.", consumer_scales=True),
    "megatron-bert": Family(steps=lambda c: _bert(c)[:-1], prefix="bert.", only=ABSOLUTE),
    "fnet": Family(steps=lambda c: [*_bert(c), project_step("embeddings.projection")], prefix="fnet."),
    "deberta-v2": Family(steps=_deberta, prefix="deberta.", limit=("max_position_embeddings", 512)),
    "esm": Family(
        steps=_esm,
        prefix="esm.",
        limit=("max_position_embeddings", 1026),
        only={"position_embedding_type": ("absolute", "rotary")},
        refused=lambda c: [c("mask_token_id")] if c("token_dropout", False) else [],
        # The library hands `inputs_embeds` to the first block as they are.
        lookup=lambda _: ALL,
    ),
    "roformer": Family(steps=_roformer, prefix="roformer.", limit=("max_position_embeddings", 1536)),
    "nomic_bert": Family(
        steps=lambda c: [
            token_step(WORDS),
            segment_step(TYPES),
            norm_step("emb_ln", c("layer_norm_eps", 1e-12), spellings=(LAYER_NORM,)),
        ],
        prefix="nomic_bert.",
        limit=("max_position_embeddings", 2048),
    ),
    "modernbert": Family(
        steps=lambda c: [
            token_step("embeddings.tok_embeddings"),
            norm_step("embeddings.norm", c("norm_eps", 1e-5), bias=c("norm_bias", False)),
        ],
        prefix="model.",
        limit=("max_position_embeddings", 8192),
    ),
    "funnel": Family(
        steps=lambda c: [token_step(WORDS), norm_step("embeddings.layer_norm", c("layer_norm_eps", 1e-9))],
        prefix="funnel.",
        # The library initializes this row again after it has loaded the file.
        zeroed=lambda c: c("pad_token_id"),
    ),
    # Where it has a table of languages, they are an input always. Left out, all are language 0; the library adds none.
    "xlm": Family(
        steps=lambda c: [
            token_step("embeddings"),
            learned_position_step("position_embeddings"),
            *(
                [Segments(input="langs", needed=True, weight=weight_keys("lang_embeddings"))]
                if c("n_langs", 1) > 1 and c("use_lang_emb", True)
                else []
            ),
            *chosen_segment_steps(c),
            norm_step("layer_norm_emb", c("layer_norm_eps", 1e-12)),
            Mask(),
        ],
        prefix="transformer.",
        segments=True,
    ),
    "xlnet": Family(steps=lambda _: [token_step("word_embedding")], prefix="transformer."),
    "clip_text_model": CLIP_TEXT,
    # In old files, the second part takes precedence.
    "clip/text": replace(CLIP_TEXT, sections=("text_config_dict", "text_config")),
}
