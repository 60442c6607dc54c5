"""Rows of BERT, of its descendants, and of other encoders, with the Hugging Face names of their tensors."""

from dataclasses import replace

from preblock.models.families.family import ALL, TIED, Family, Tied, absolute
from preblock.models.families.layer_kinds import FULL, SLIDING, alternating_kinds
from preblock.models.families.named_steps import (
    chosen_segment_steps,
    count,
    learned_position_step,
    norm_step,
    project_step,
    root_scale,
    segment_step,
    token_step,
    unpadded_position_step,
    weight_keys,
    when,
)
from preblock.models.families.published_config import Config
from preblock.models.families.rotary import Rotary, theta, thetas_by_layer
from preblock.models.modules.bias import RelativeSinusoidConfig
from preblock.models.steps import Mask, Norm, Scale, Segments, Step

WORDS, TYPES, PLACES, LAYER_NORM = (
    f"embeddings.{name}" for name in ("word_embeddings", "token_type_embeddings", "position_embeddings", "LayerNorm")
)
ABSOLUTE = {"position_embedding_type": ("absolute",)}


def _norm(c: Config, name: str = LAYER_NORM, *spellings: str) -> Norm:
    return norm_step(name, c("layer_norm_eps", 1e-12), spellings=spellings)


def _bert(c: Config) -> list[Step]:
    return [token_step(WORDS), segment_step(TYPES), learned_position_step(PLACES), _norm(c)]


def _roberta(c: Config) -> list[Step]:
    positions = unpadded_position_step(PLACES, c("pad_token_id", 1))
    return [token_step(WORDS), segment_step(TYPES), positions, _norm(c)]


def _electra(c: Config) -> list[Step]:
    projected = c("embedding_size", 128) != c("hidden_size", 256)
    return [*_bert(c), *when(projected, project_step("embeddings_project"))]


def _projection(c: Config, name: str, *, bias: bool = True) -> list[Step]:
    """Return a projection of narrower tables to the hidden size, if they are narrower."""
    return when(c("embedding_size", c("hidden_size")) != c("hidden_size"), project_step(name, bias=bias))


def _albert(c: Config) -> list[Step]:
    return [*_bert(c), project_step("encoder.embedding_hidden_mapping_in")]


def _big_bird(c: Config) -> list[Step]:
    tokens, *others = _bert(c)
    return [tokens, *when(c("rescale_embeddings", False), root_scale(c)), *others]


def _deberta(c: Config) -> list[Step]:
    return [
        token_step(WORDS),
        *when(c("position_biased_input", True), learned_position_step(PLACES)),
        *when(c("type_vocab_size", 0), segment_step(TYPES)),
        *_projection(c, "embeddings.embed_proj", bias=False),
        norm_step(LAYER_NORM, c("layer_norm_eps", 1e-7)),
        Mask(),
    ]


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
        steps.append(_norm(c, "embeddings.layer_norm"))
    return [*steps, Mask()]


def _xlm(c: Config) -> list[Step]:
    # Where it has a table of languages, they are an input always. Left out, all are language 0; the library adds none.
    languages = c("n_langs", 1) > 1 and c("use_lang_emb", True)
    return [
        token_step("embeddings"),
        learned_position_step("position_embeddings"),
        *when(languages, Segments(input="langs", needed=True, weight=weight_keys("lang_embeddings"))),
        *chosen_segment_steps(c),
        _norm(c, "layer_norm_emb"),
        Mask(),
    ]


def _xlnet_bias(c: Config) -> RelativeSinusoidConfig:
    clamp_len = c("clamp_len", -1)
    limit = clamp_len if clamp_len > 0 else None
    return RelativeSinusoidConfig(
        width=count(c, 1024, "d_model"),
        clamp_len=limit,
        bidirectional=c("attn_type", "bi") == "bi",
    )


_ENCODER = absolute(_bert, "bert.", Tied(True, "cls.predictions.decoder.weight"))
_ROBERTA = replace(
    _ENCODER, steps=_roberta, prefix="roberta.", tied=Tied(True, "lm_head.decoder.weight"), padding=1, only=ABSOLUTE
)

BERT: dict[str, Family] = {
    "bert": replace(_ENCODER, padding=0, only=ABSOLUTE),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta-xl": replace(
        _ROBERTA,
        steps=lambda c: [token_step(WORDS), segment_step(TYPES), unpadded_position_step(PLACES, c("pad_token_id", 1))],
    ),
    # Its padding id is 1; the library ignores the config.
    "mpnet": replace(
        _ROBERTA,
        steps=lambda c: [token_step(WORDS), unpadded_position_step(PLACES, 1), _norm(c)],
        prefix="mpnet.",
        only={"pad_token_id": (1,)},
    ),
    "distilbert": replace(
        _ENCODER,
        steps=lambda _: [token_step(WORDS), learned_position_step(PLACES), norm_step(LAYER_NORM, 1e-12)],
        prefix="distilbert.",
        tied=Tied(True, "vocab_projector.weight"),
    ),
    "electra": replace(
        _ENCODER, steps=_electra, prefix="electra.", tied=Tied(True, "generator_lm_head.weight"), only=ABSOLUTE
    ),
    "albert": replace(
        _ENCODER, steps=_albert, prefix="albert.", tied=Tied(True, "predictions.decoder.weight"), only=ABSOLUTE
    ),
    "rembert": replace(_ENCODER, steps=_albert, prefix="rembert.", tied=None),
    "big_bird": replace(_ENCODER, steps=_big_bird, consumer_scales=True),
    "megatron-bert": replace(_ENCODER, steps=lambda c: _bert(c)[:-1], only=ABSOLUTE),
    "fnet": replace(_ENCODER, steps=lambda c: [*_bert(c), project_step("embeddings.projection")], prefix="fnet."),
    "deberta-v2": replace(_ENCODER, steps=_deberta, prefix="deberta.", limit=("max_position_embeddings", 512)),
    "esm": replace(
        _ENCODER,
        steps=_esm,
        prefix="esm.",
        limit=("max_position_embeddings", 1026),
        # Published files hold frequencies rounded to float16 in training.
        rotary=Rotary(
            heads=12,
            types=(),
            tensors=("rotary_embeddings.inv_freq", "encoder.layer.0.attention.self.rotary_embeddings.inv_freq"),
            when=lambda c: c.nullable("position_embedding_type", "absolute") == "rotary",
        ),
        tied=_ROBERTA.tied,
        only={"position_embedding_type": ("absolute", "rotary")},
        refused=lambda c: [c("mask_token_id")] if c("token_dropout", False) else [],
        # The library hands `inputs_embeds` to the first block as they are.
        lookup=lambda _: ALL,
    ),
    "roformer": replace(
        _ENCODER,
        steps=lambda c: [token_step(WORDS), segment_step(TYPES), _norm(c), *_projection(c, "embeddings_project")],
        prefix="roformer.",
        limit=("max_position_embeddings", 1536),
        rotary=Rotary(
            heads=12,
            thetas=theta(10000.0, None),
            types=(),
            layout="interleaved",
            angles="float64",
            tensors=("encoder.embed_positions.weight",),
        ),
    ),
    "nomic_bert": replace(
        _ENCODER,
        steps=lambda c: [token_step(WORDS), segment_step(TYPES), _norm(c, "emb_ln", LAYER_NORM)],
        prefix="nomic_bert.",
        limit=("max_position_embeddings", 2048),
        rotary=Rotary(heads=12, thetas=theta(1000.0)),
    ),
    "modernbert": replace(
        _ENCODER,
        steps=lambda c: [
            token_step("embeddings.tok_embeddings"),
            norm_step("embeddings.norm", c("norm_eps", 1e-5), bias=c("norm_bias", False)),
        ],
        prefix="model.",
        limit=("max_position_embeddings", 8192),
        rotary=Rotary(
            heads=12,
            thetas=thetas_by_layer(full=("global_rope_theta", 160_000.0), sliding=("local_rope_theta", 10000.0)),
            scaled=(FULL, SLIDING),
            layers=alternating_kinds(22, "global_attn_every_n_layers", 3, begins_full=True),
            strict=True,
        ),
        tied=Tied(True, "decoder.weight"),
    ),
    "funnel": replace(
        _ENCODER,
        steps=lambda c: [token_step(WORDS), norm_step("embeddings.layer_norm", c("layer_norm_eps", 1e-9))],
        prefix="funnel.",
        tied=TIED,
        # The library initializes this row again after it has loaded the file.
        zeroed=lambda c: c("pad_token_id"),
    ),
    "xlm": replace(
        _ENCODER, steps=_xlm, prefix="transformer.", tied=Tied(True, "pred_layer.proj.weight"), segments=True
    ),
    "xlnet": replace(
        _ENCODER,
        steps=lambda _: [token_step("word_embedding")],
        prefix="transformer.",
        bias=_xlnet_bias,
        tied=Tied(True, "lm_loss.weight"),
        # With bi_data, each half of a batch reads the distances in another direction.
        only={"attn_type": ("bi", "uni"), "bi_data": (False,)},
    ),
}
